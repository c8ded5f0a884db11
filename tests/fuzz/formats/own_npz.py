"""A user's own arrays: to be dealt, divided already, and one client's alone."""

import io
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fedunfold.data.federated import FederatedData
from fedunfold.data.sources import load_npz, load_npz_clients
from fedunfold.engines.flower.federations import FederationConfig, client_from_npz
from fedunfold.tasks import classification
from tests.fuzz import mutation
from tests.fuzz.judging import understood_by_any, written


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.npz", data)
    config = FederationConfig(client_ids=("a",), task=classification(3), rounds=1, batch_size=2, lr=0.1)
    readers = (lambda: _dealt(path), lambda: _divided(path), lambda: client_from_npz(path, "a", config).register())
    return understood_by_any(readers, "fuzzed.npz", "client", "class", "test set")


def _dealt(path: Path) -> None:
    rows = load_npz(path)
    FederatedData.from_clients({"a": (rows.x_train, rows.y_train)}, (rows.x_test, rows.y_test)).label_counts  # noqa: B018


def _divided(path: Path) -> None:
    FederatedData.from_clients(*load_npz_clients(path)).label_counts  # noqa: B018


def seeds() -> Mapping[str, bytes]:
    x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.array([0, 1, 2, 0, 1, 2])
    pictures = np.arange(96, dtype=np.uint8).reshape(6, 4, 4)
    test = {"x_test": x, "y_test": y}
    return {
        "dealt": _saved(x_train=x, y_train=y, **test),
        "dealt-pictures": _saved(x_train=pictures, y_train=y.astype(np.uint8), x_test=pictures, y_test=y),
        "divided": _saved(x_a=x, y_a=y, x_b=x[:2], y_b=y[:2], **test),
        "one-client": _saved(x=x.astype(np.float64), y=y),
    }


def _saved(**arrays: Any) -> bytes:
    members = []
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array)
        members.append((f"{name}.npy", file.getvalue()))
    return mutation.zipped(members)


def mutate(data: bytes, rng: Random) -> bytes:
    return mutation.of_archive(data, rng, {".npy": mutation.of_numpy})

"""The example app over a grid in this process: the clients' own files, bad ones, and bad clients."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedunfold.config import Environment
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.task import TASKS
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from tests.engines.flower.test_strategy import changed
from tests.support.grid import LocalGrid, Spoil

APP = Path(__file__).parents[3] / "examples" / "flower"
sys.path.insert(0, str(APP))
from fedunfold_app import client_app, server_app  # noqa: E402  (the app's folder is no package)

DEFAULTS: dict[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
KEYS = ("north", "south", "east")


def samples(rows: int, seed: int) -> tuple[Any, Any]:
    """Three classes that lie apart."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, rows)
    return (np.eye(3, 4)[y] + draw.normal(0, 0.3, (rows, 4))).astype(np.float32), y


def run(tmp_path: Path, spoil: Spoil | None = None, nodes: Any = None, **settings: Any) -> Any:
    """Run the app on three files in a folder; gives its report."""
    config = DEFAULTS | {
        "clients": " ".join(KEYS),
        "task": "classification:classes=3",
        "rounds": 3,
        "precision": "float64",
    }
    config |= {"registration-timeout": 0.0, "iterations": 2, "folder": str(tmp_path)} | settings
    nodes = nodes or {k: {"client-id": key, "path": str(tmp_path / f"{key}.npz")} for k, key in enumerate(KEYS)}
    grid = LocalGrid(client_app.app, nodes, spoil, config)
    server_app.main(grid, Context(1, 1, {}, RecordDict(), config))
    return json.loads((tmp_path / "report.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k, key in enumerate(KEYS):
        x, y = samples(20 + 5 * k, k)
        np.savez(tmp_path / f"{key}.npz", x=x, y=y)
    x, y = samples(50, 9)
    np.savez(tmp_path / "test.npz", x=x, y=y)
    return tmp_path


def in_memory() -> Environment:
    clients = {key: samples(20 + 5 * k, k) for k, key in enumerate(KEYS)}
    return Environment.from_arrays(
        clients, samples(50, 9), rounds=3, batch_size=10, lr=0.05, epochs=2, model=(32,), classes=3
    )


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_own_files_give_the_engines_numbers(folder: Path, adjoint: Any) -> None:
    report = run(folder, test=str(folder / "test.npz"), adjoint=adjoint)
    federation = SimulatedFederation(in_memory(), dtype=torch.float64)
    expected = learn(federation, 3, learning=Learning(iterations=2, adjoint=adjoint))
    found = LearnedWeights.load(folder / "weights.safetensors")
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=0)
    for name, rule in (("learned", expected), ("size", size())):
        last = run_rounds(federation, rule, 3)[0].evaluations[-1]
        assert report["runs"][name]["accuracy"] == last.score
        assert report["runs"][name]["loss"] == pytest.approx(last.loss, rel=1e-9)
    assert report["tested_on"] == str(folder / "test.npz")
    assert report["failures"] == {}


def test_without_a_test_set_the_clients_test(folder: Path) -> None:
    report = run(folder, method="fedavg")
    env = in_memory()
    federation, data = SimulatedFederation(env, dtype=torch.float64), env.load()
    model = run_rounds(federation, size(), 3)[0].model
    together = Environment.from_arrays(
        {"all": (data.x, data.y)}, (data.x, data.y), rounds=1, batch_size=10, lr=0.05, model=(32,), classes=3
    )
    expected = SimulatedFederation(together, dtype=torch.float64).evaluate([model])[0]
    assert report["tested_on"] == "the clients' own training data"
    assert report["runs"]["size"]["accuracy"] == pytest.approx(expected.score)
    assert report["runs"]["size"]["loss"] == pytest.approx(expected.loss)
    assert set(report["runs"]) == {"size"}


@pytest.mark.parametrize("chosen", ["regression", "regression:loss=huber,delta=0.5", "survival:ties=breslow"])
@pytest.mark.parametrize("tested", [True, False])
def test_other_tasks(tmp_path: Path, chosen: str, tested: bool) -> None:
    """The app learns weights for them and trains with these, as the simulation does."""
    rows = {}
    for k, key in enumerate((*KEYS, "test")):
        x, y = samples(20 + 5 * k, k)
        draw = np.random.default_rng(k)
        targets = x.sum(1) if chosen.startswith("regression") else np.stack([draw.exponential(np.exp(-y)), y > 0], 1)
        rows[key] = x, targets
        np.savez(tmp_path / f"{key}.npz", x=x, y=targets)
    report = run(tmp_path, task=chosen, test=str(tmp_path / "test.npz") if tested else "")
    test, made = rows.pop("test"), TASKS.parse(chosen)
    settings: dict[str, Any] = {"rounds": 3, "batch_size": 10, "lr": 0.05, "epochs": 2, "model": (32,), "task": made}
    federation = SimulatedFederation(Environment.from_arrays(rows, test, **settings), dtype=torch.float64)
    expected = learn(federation, 3, learning=Learning(iterations=2))
    found = LearnedWeights.load(tmp_path / "weights.safetensors")
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=0)
    (last,) = federation.evaluate([run_rounds(federation, expected, 3)[0].model])
    reported = report["runs"]["learned"]
    assert set(last.metrics) < set(reported) and report["task"] == made.describe()
    if tested:
        assert {name: reported[name] for name in last.metrics} == pytest.approx(dict(last.metrics), rel=1e-9)


def test_a_run_that_is_over_is_not_run_again(folder: Path) -> None:
    first = run(folder, test=str(folder / "test.npz"))
    received: list[str] = []

    def listen(reply: Message, node: int) -> Message:
        received.append(reply.metadata.message_type)
        return reply

    second = run(folder, listen, test=str(folder / "test.npz"))
    assert second["runs"] == first["runs"]
    assert set(received) == {"query.register"}


# --- what can be wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "client north: .*north.npz does not exist; check the path"),
        ({"x": np.zeros((4, 4))}, "client north: .*north.npz has no y, only x"),
        ({"x": np.zeros(4), "y": np.zeros(4, int)}, r"x in .*north.npz has shape \(4,\); give \[samples, features\]"),
        ({"x": np.zeros((4, 4)), "y": np.zeros(3, int)}, r"y in .*north.npz has shape \(3,\) but its x has 4 rows"),
        ({"x": np.zeros((4, 4)), "y": np.full(4, 3)}, "y in .*north.npz has the label 3 but there are 3 classes"),
        ({"x": np.zeros((4, 4)), "y": np.full(4, -1)}, "y in .*north.npz has the label -1"),
        ({"x": np.full((4, 4), np.nan), "y": np.zeros(4, int)}, "has a NaN or infinite value in row 0"),
        ({"x": np.array([{}] * 4), "y": np.zeros(4, int)}, "x in .*north.npz cannot be read"),
    ],
)
def test_a_file_that_is_wrong(folder: Path, arrays: Any, message: str) -> None:
    file = folder / "north.npz"
    file.unlink()
    if arrays is not None:
        np.savez(file, **arrays)
    with pytest.raises(FederationError, match=message):
        run(folder)


def test_a_file_with_other_features_than_the_others(folder: Path) -> None:
    np.savez(folder / "north.npz", x=np.zeros((4, 5)), y=np.zeros(4, int))
    with pytest.raises(InputError, match=r"client south has rows of shape \[4\], north has \[5\]; make"):
        run(folder)


def test_settings_that_are_wrong(folder: Path) -> None:
    with pytest.raises(InputError, match=r"test\.npz has the label 2 but there are 2 classes"):
        run(folder, task="classification:classes=2", test=str(folder / "test.npz"))
    with pytest.raises(InputError, match=r"nowhere\.npz does not exist"):
        run(folder, test=str(folder / "nowhere.npz"))
    with pytest.raises(InputError, match="task 'classification' needs the setting 'classes'"):
        run(folder, task="classification")
    with pytest.raises(InputError, match="unknown task 'regresion'; did you mean 'regression'"):
        run(folder, task="regresion")
    with pytest.raises(InputError, match="precision is float32 or float64"):
        run(folder, precision="float16")
    with pytest.raises(InputError, match="hidden is a list of widths"):
        run(folder, hidden="32,16")
    with pytest.raises(
        FederationError, match=r"client 'north' did not register.*node-config needs the client's id and data"
    ):
        run(folder, nodes={1: {"partition-id": 0}})
    with pytest.raises(FederationError, match="client 'west' is not one of this federation's: north, south, east"):
        run(folder, nodes={1: {"client-id": "west", "path": "west.npz"}})


def _nan(reply: Message) -> RecordDict:
    return changed(reply, updates=np.full_like(reply.content.array_records["arrays"]["updates"].numpy(), np.nan))


def _short(reply: Message) -> RecordDict:
    return changed(reply, updates=np.zeros(3))


def _other_key(reply: Message) -> RecordDict:
    return changed(reply, gradient=np.zeros(3))


def _inflated(reply: Message) -> RecordDict:
    reply.content.metric_records["metrics"]["num-examples"] = 10**9
    return reply.content


def _empty(reply: Message) -> RecordDict:
    return RecordDict()


def test_bad_clients_all_at_once(folder: Path) -> None:
    """One good client, and one of each kind of bad one: the run ends, and the report counts them."""
    bad = {
        "nan": _nan,
        "short": _short,
        "other-key": _other_key,
        "inflated": _inflated,
        "empty": _empty,
        "silent": None,
    }
    keys = ["good", *bad]
    for k, key in enumerate(keys):
        x, y = samples(20, k)
        np.savez(folder / f"{key}.npz", x=x, y=y)
    nodes = {k: {"client-id": key, "path": str(folder / f"{key}.npz")} for k, key in enumerate(keys)}

    def spoil(reply: Message, node: int) -> Message | None:
        spoiled = bad.get(keys[node])
        if keys[node] == "good" or reply.metadata.message_type != "train":
            return reply
        if spoiled is None:
            return None
        reply.content = spoiled(reply)
        return reply

    report = run(
        folder, spoil, nodes, clients=" ".join(keys), test=str(folder / "test.npz"), method="fedavg", timeout=0.2
    )
    assert report["failures"] == {
        "nan": {"rejected": 3},
        "short": {"rejected": 3},
        "other-key": {"rejected": 3},
        "inflated": {"rejected": 3},
        "empty": {"failed": 3},
        "silent": {"no answer": 3},
    }
    assert report["runs"]["size"]["participated"] == [[1, 0, 0, 0, 0, 0, 0]] * 3
    learned = run(folder, spoil, nodes, clients=" ".join(keys), test=str(folder / "test.npz"), timeout=0.2)
    assert learned["runs"]["learned"]["accuracy"] > 0.3

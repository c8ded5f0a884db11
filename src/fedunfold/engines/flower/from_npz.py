"""Clients with data of their own: an .npz with x and y beside every SuperNode, and a server that sees none of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from flwr.serverapp import Grid
from pydantic import AfterValidator, Field

from fedunfold.config import Environment, ModelSpec
from fedunfold.config.model import model_factory
from fedunfold.config.schema import BatchSize, Rounds
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.data.arrays import Features, Labels, features, labels
from fedunfold.data.npz import read_npz
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.secure_server import PrivateFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.transport import FlowerChannel
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.limits import CLASSES, EPOCHS


class FederationConfig(Settings):
    """What server and clients have to agree on before they meet: who takes part, and what is trained how."""

    keys: tuple[str, ...] = Field(min_length=1)
    classes: Annotated[int, Field(ge=2), AfterValidator(CLASSES.check)]
    rounds: Rounds
    batch_size: BatchSize
    lr: float = Field(gt=0)
    epochs: Annotated[Count, AfterValidator(EPOCHS.check)] = 1
    model: ModelSpec = ModelSpec()
    clients_per_round: Count | None = None
    seed: Natural = 0


def site_from_npz(
    path: str | Path, key: str, agreed: FederationConfig, dtype: torch.dtype = torch.float32
) -> LocalClient:
    """The client whose samples are x[n, …] and y[n] of a file; uint8 counts as image bytes and becomes x/255."""
    if key not in agreed.keys:
        raise InputError(f"client '{key}' is not one of this federation's: {', '.join(agreed.keys)}.")
    try:
        x, y = _samples(path, agreed.classes)
    except InputError as error:
        raise InputError(f"client {key}: {error}") from error
    model = model_factory(agreed.model, x.shape[1:], agreed.classes)
    return LocalClient(key, torch.from_numpy(x), torch.from_numpy(y), agreed.classes, model, dtype)


def federation_of(
    grid: Grid,
    agreed: FederationConfig,
    test: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    patience: float = 300.0,
    private: bool = False,
) -> RemoteFederation:
    """The agreed clients behind a grid, tested on x and y of a file that the server has.

    Without one, models are tested by the clients, each on its own samples. With `private` the server sees sums of
    their vectors only.
    """
    tested = None if test is None else _samples(test, agreed.classes)  # a wrong file is better found before the wait
    channel = FlowerChannel(grid, agreed.keys, timeout=timeout, patience=patience)
    shape = channel.registrations()[0].features
    # The clients' samples are not here: a row of zeros stands for each.
    nothing = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)
    env = _environment(agreed, dict.fromkeys(agreed.keys, nothing), tested or nothing)
    model = model_factory(agreed.model, shape, agreed.classes)
    evaluate = SimulatedFederation(env, dtype=dtype).evaluate if tested else None
    kind = PrivateFederation if private else RemoteFederation
    return kind(channel, env, model, evaluate, dtype=dtype)


def _environment(
    agreed: FederationConfig, clients: Mapping[str, tuple[Features, Labels]], test: tuple[Features, Labels]
) -> Environment:
    return Environment.from_arrays(
        clients,
        test,
        rounds=agreed.rounds,
        batch_size=agreed.batch_size,
        lr=agreed.lr,
        epochs=agreed.epochs,
        model=agreed.model,
        classes=agreed.classes,
        clients_per_round=agreed.clients_per_round,
        seed=agreed.seed,
        name="own-data",
    )


def _samples(path: str | Path, classes: int) -> tuple[Features, Labels]:
    path = Path(path).expanduser()
    found = read_npz(path, ["x", "y"])
    (x,) = features({f"x in {path}": found["x"]}).values()
    return x, labels(found["y"], f"y in {path}", len(x), classes)

"""Clients and servers, for two kinds of federations.

Those of an environment whose data can be loaded are for simulations, tests and the example. Those with custom data have
an .npz with x and y beside every SuperNode, and a server that sees none of them.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid
from pydantic import AfterValidator, Field

from fedunfold.config import Environment, ModelSpec, environment
from fedunfold.config.fields import BatchSize, Rounds
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.data.arrays import Features, Labels, features, labels
from fedunfold.data.npz import read_npz
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.secure_server import SecureFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.limits import CLASSES, EPOCHS


def client_from_environment(
    env: Environment | str | Path, context: Context, dtype: torch.dtype = torch.float32
) -> LocalClient:
    """The client of an environment that a node is.

    Args:
        env: The environment.
        context: Its node-config says which client it is, by `client-id` or by `partition-id`.
        dtype: The type of the models.
    """
    env = environment(env)
    data = env.load()
    chosen = context.node_config.get("client-id")
    if chosen is None:
        number = context.node_config.get("partition-id")
        if not (isinstance(number, int) and 0 <= number < len(data.keys)):
            raise InputError(f"node-config needs client-id=… with one of {', '.join(data.keys[:5])}, ….")
        chosen = data.keys[number]
    chosen = str(chosen)  # Flower reads client-id=2 as a number
    if chosen not in data.keys:
        raise InputError(f"client '{chosen}' is not in the environment; its clients are {', '.join(data.keys[:5])}.")
    x, y = data.client(data.keys.index(chosen))
    return LocalClient(chosen, x, y, data.classes, model_factory(env.model, tuple(x.shape[1:]), data.classes), dtype)


def federation_from_environment(
    grid: Grid,
    env: Environment | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    registration_timeout: float = 300.0,
    secure_aggregation: bool = False,
) -> RemoteFederation:
    """An environment's clients behind a grid, tested on the environment's test set.

    Args:
        grid: Flower's grid.
        env: The environment.
        dtype: The type of the models.
        timeout: Seconds a client may take to reply.
        registration_timeout: Seconds all clients may take to register.
        secure_aggregation: Whether the server is to see sums of the clients' vectors only.
    """
    env = environment(env)
    tester = _tester(env, dtype)
    client_ids, data = [client.key for client in env.clients], tester.data
    transport = FlowerTransport(grid, client_ids, timeout=timeout, registration_timeout=registration_timeout)
    model = model_factory(env.model, tuple(data.x.shape[1:]), data.classes)
    kind = SecureFederation if secure_aggregation else RemoteFederation
    return kind(transport, env, model, tester.evaluate, dtype=dtype)


class FederationConfig(Settings):
    """What server and clients have to agree on beforehand.

    Attributes:
        client_ids: Who is in the federation.
        classes: How many classes there are.
        rounds: T.
        batch_size: B.
        lr: η.
        epochs: E_k, the same for all.
        model: What is trained.
        clients_per_round: C, how many clients are sampled for a round; None for all.
        seed: Of all randomness.
    """

    client_ids: tuple[str, ...] = Field(min_length=1)
    classes: Annotated[int, Field(ge=2), AfterValidator(CLASSES.check)]
    rounds: Rounds
    batch_size: BatchSize
    lr: float = Field(gt=0)
    epochs: Annotated[Count, AfterValidator(EPOCHS.check)] = 1
    model: ModelSpec = ModelSpec()
    clients_per_round: Count | None = None
    seed: Natural = 0


def client_from_npz(
    path: str | Path, client_id: str, config: FederationConfig, dtype: torch.dtype = torch.float32
) -> LocalClient:
    """The client whose samples are in a file.

    Args:
        path: An .npz with x[n, …] and y[n]; uint8 counts as image bytes and becomes x/255.
        client_id: Its name in the federation.
        config: The federation.
        dtype: The type of the models.
    """
    if client_id not in config.client_ids:
        raise InputError(f"client '{client_id}' is not one of this federation's: {', '.join(config.client_ids)}.")
    try:
        x, y = _samples(path, config.classes)
    except InputError as error:
        raise InputError(f"client {client_id}: {error}") from error
    model = model_factory(config.model, x.shape[1:], config.classes)
    return LocalClient(client_id, torch.from_numpy(x), torch.from_numpy(y), config.classes, model, dtype)


def federation_from_config(
    grid: Grid,
    config: FederationConfig,
    test: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    registration_timeout: float = 300.0,
    secure_aggregation: bool = False,
) -> RemoteFederation:
    """The clients of a federation behind a grid.

    Args:
        grid: Flower's grid.
        config: The federation.
        test: An .npz with x and y that the server has; without one, models are tested by the clients, each on its own
            samples.
        dtype: The type of the models.
        timeout: Seconds a client may take to reply.
        registration_timeout: Seconds all clients may take to register.
        secure_aggregation: Whether the server is to see sums of the clients' vectors only.
    """
    tested = None if test is None else _samples(test, config.classes)  # a wrong file is better found before the wait
    transport = FlowerTransport(grid, config.client_ids, timeout=timeout, registration_timeout=registration_timeout)
    shape = transport.registrations()[0].feature_shape
    # The clients' samples are not here: a row of zeros stands for each.
    nothing = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)
    settings = {name: value for name, value in config if name != "client_ids"}
    clients = dict.fromkeys(config.client_ids, nothing)
    env = Environment.from_arrays(clients, tested or nothing, name="custom-data", **settings)
    model = model_factory(config.model, shape, config.classes)
    evaluate = SimulatedFederation(env, dtype=dtype).evaluate if tested else None
    kind = SecureFederation if secure_aggregation else RemoteFederation
    return kind(transport, env, model, evaluate, dtype=dtype)


@lru_cache(maxsize=1)
def _tester(env: Environment, dtype: torch.dtype) -> SimulatedFederation:
    return SimulatedFederation(env, dtype=dtype)


def _samples(path: str | Path, classes: int) -> tuple[Features, Labels]:
    path = Path(path).expanduser()
    found = read_npz(path, ["x", "y"])
    (x,) = features({f"x in {path}": found["x"]}).values()
    return x, labels(found["y"], f"y in {path}", len(x), classes)

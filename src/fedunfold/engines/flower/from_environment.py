"""Clients and servers of an environment whose data can be loaded: for simulations, tests and the example."""

from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid

from fedunfold.config import Environment, environment
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.secure_server import SecureFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.engines.simulation import SimulatedFederation


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
    client_ids = [client.key for client in env.clients]
    transport = FlowerTransport(grid, client_ids, timeout=timeout, registration_timeout=registration_timeout)
    data = env.load()
    build = model_factory(env.model, tuple(data.x.shape[1:]), data.classes)
    kind = SecureFederation if secure_aggregation else RemoteFederation
    return kind(transport, env, build, tester.evaluate, dtype=dtype)


@lru_cache(maxsize=1)
def _tester(env: Environment, dtype: torch.dtype) -> SimulatedFederation:
    return SimulatedFederation(env, dtype=dtype)

"""Sites and servers of an environment whose data can be loaded: for simulations, tests and the example."""

from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid

from fedunfold.config import Environment, environment
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.secure_server import PrivateFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.transport import FlowerChannel
from fedunfold.engines.simulation import SimulatedFederation


def site_of(env: Environment | str | Path, context: Context, dtype: torch.dtype = torch.float32) -> LocalClient:
    """The client of an environment that a node is: by `key` in its node-config, or by `partition-id`."""
    env = environment(env)
    data = env.load()
    chosen = context.node_config.get("key")
    if chosen is None:
        number = context.node_config.get("partition-id")
        if not (isinstance(number, int) and 0 <= number < len(data.keys)):
            raise InputError(f"node-config needs key=… with one of {', '.join(data.keys[:5])}, ….")
        chosen = data.keys[number]
    chosen = str(chosen)  # Flower reads key=2 as a number
    if chosen not in data.keys:
        raise InputError(f"client '{chosen}' is not in the environment; its clients are {', '.join(data.keys[:5])}.")
    x, y = data.client(data.keys.index(chosen))
    return LocalClient(chosen, x, y, data.classes, model_factory(env.model, tuple(x.shape[1:]), data.classes), dtype)


def federation(
    grid: Grid,
    env: Environment | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    patience: float = 300.0,
    private: bool = False,
) -> RemoteFederation:
    """An environment's clients behind a grid, tested on the environment's test set.

    With `private` the server sees sums of their vectors only.
    """
    env = environment(env)
    tester = _tester(env, dtype)
    channel = FlowerChannel(grid, [client.key for client in env.clients], timeout=timeout, patience=patience)
    data = env.load()
    build = model_factory(env.model, tuple(data.x.shape[1:]), data.classes)
    kind = PrivateFederation if private else RemoteFederation
    return kind(channel, env, build, tester.evaluate, dtype=dtype)


@lru_cache(maxsize=1)
def _tester(env: Environment, dtype: torch.dtype) -> SimulatedFederation:
    return SimulatedFederation(env, dtype=dtype)

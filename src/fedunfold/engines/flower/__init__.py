"""The same federation over Flower: real clients, real network, data stay where they are (extra `flower`)."""

from fedunfold.core.errors import InputError

try:
    import flwr  # noqa: F401  (only to see that it is installed)
except ModuleNotFoundError as error:
    raise InputError(
        "running over Flower needs its package; install it with: pip install 'fedunfold[flower]'"
    ) from error

from fedunfold.engines.flower.bfloat16 import bfloat16_mod
from fedunfold.engines.flower.buffered import BufferedStrategy
from fedunfold.engines.flower.client import client_app, registration_mod, report_metrics_mod
from fedunfold.engines.flower.federations import (
    FederationConfig,
    client_from_environment,
    client_from_npz,
    federation_from_config,
    federation_from_environment,
)
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.own_training import own_training_app
from fedunfold.engines.flower.schema import ClientDescription
from fedunfold.engines.flower.secure_server import SecureFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.strategy import WeightedStrategy

__all__ = [
    "BufferedStrategy",
    "ClientDescription",
    "FederationConfig",
    "LocalClient",
    "RemoteFederation",
    "SecureFederation",
    "WeightedStrategy",
    "bfloat16_mod",
    "client_app",
    "client_from_environment",
    "client_from_npz",
    "federation_from_config",
    "federation_from_environment",
    "own_training_app",
    "registration_mod",
    "report_metrics_mod",
]

"""The same federation over Flower: real clients, real network, data stay where they are (extra `flower`)."""

from fedunfold.core.errors import InputError

try:
    import flwr  # noqa: F401 (only to see that it is there)
except ModuleNotFoundError as error:
    raise InputError(
        "running over Flower needs its package; install it with: pip install 'fedunfold[flower]'"
    ) from error

from fedunfold.engines.flower.client import add_registration, client_app, reporting
from fedunfold.engines.flower.from_environment import federation, site_of
from fedunfold.engines.flower.from_npz import FederationConfig, federation_of, site_from_npz
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import ClientDescription
from fedunfold.engines.flower.secure_server import PrivateFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.strategy import WeightedStrategy

__all__ = [
    "ClientDescription",
    "FederationConfig",
    "LocalClient",
    "PrivateFederation",
    "RemoteFederation",
    "WeightedStrategy",
    "add_registration",
    "client_app",
    "federation",
    "federation_of",
    "reporting",
    "site_from_npz",
    "site_of",
]

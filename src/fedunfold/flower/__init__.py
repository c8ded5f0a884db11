"""The same federation over Flower: real clients, real network, data stay where they are (extra `flower`)."""

from fedunfold.errors import InputError

try:
    import flwr  # noqa: F401 (only to see that it is there)
except ModuleNotFoundError as error:
    raise InputError(
        "running over Flower needs its package; install it with: pip install 'fedunfold[flower]'"
    ) from error

from fedunfold.flower.assignment import Registration
from fedunfold.flower.bundled import federation, site_of
from fedunfold.flower.client import client_app, introduce, reporting
from fedunfold.flower.own_data import Agreement, federation_of, site_from_npz
from fedunfold.flower.private import PrivateFederation
from fedunfold.flower.remote import RemoteFederation
from fedunfold.flower.site import Site
from fedunfold.flower.strategy import WeightedStrategy

__all__ = [
    "Agreement",
    "PrivateFederation",
    "Registration",
    "RemoteFederation",
    "Site",
    "WeightedStrategy",
    "client_app",
    "federation",
    "federation_of",
    "introduce",
    "reporting",
    "site_from_npz",
    "site_of",
]

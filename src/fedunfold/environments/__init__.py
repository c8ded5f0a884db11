"""Federations described: the validated settings, and the ones that come with the package."""

from fedunfold.environments.description import Client, Environment, ModelSpec
from fedunfold.environments.finding import bundled, environment

__all__ = ["Client", "Environment", "ModelSpec", "bundled", "environment"]

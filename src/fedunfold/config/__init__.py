"""Federations described: the validated settings, and the ones that come with the package."""

from fedunfold.config.registry import bundled, environment
from fedunfold.config.schema import Client, Environment, ModelSpec

__all__ = ["Client", "Environment", "ModelSpec", "bundled", "environment"]

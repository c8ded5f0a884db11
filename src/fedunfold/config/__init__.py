"""Federations described: the validated settings, and the ones that come with the package."""

from fedunfold.config.clock import Clock
from fedunfold.config.fields import Client
from fedunfold.config.model import GruSpec, ModelSpec
from fedunfold.config.registry import bundled, environment
from fedunfold.config.schema import Environment

__all__ = ["Client", "Clock", "Environment", "GruSpec", "ModelSpec", "bundled", "environment"]

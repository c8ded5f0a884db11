"""The federation in one process: all clients of a round advance together, on CPU or GPU."""

from fedunfold.engines.simulation.choosing import kernel_name
from fedunfold.engines.simulation.engine import SimulatedFederation

__all__ = ["SimulatedFederation", "kernel_name"]

"""The federation in one process: all clients of a round advance together, on CPU or GPU."""

from fedunfold.engines.simulation.engine import SimulatedFederation
from fedunfold.engines.simulation.kernels import kernel_name

__all__ = ["SimulatedFederation", "kernel_name"]

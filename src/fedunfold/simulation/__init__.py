"""The federation in one process: all clients of a round advance together, on CPU or GPU."""

from fedunfold.simulation.engine import SimulatedFederation, kernel_name

__all__ = ["SimulatedFederation", "kernel_name"]

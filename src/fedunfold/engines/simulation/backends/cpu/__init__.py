"""On a CPU: a round's whole local training in one call, for stacks of linear layers of any depth."""

from fedunfold.engines.simulation.backends.cpu.bindings import is_built

__all__ = ["is_built"]

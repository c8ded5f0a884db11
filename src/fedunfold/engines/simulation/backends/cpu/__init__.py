"""On a CPU: a round's whole local walk in one call, for stacks of linear layers of any depth."""

from fedunfold.engines.simulation.backends.cpu.bindings import is_built
from fedunfold.engines.simulation.backends.cpu.local_training import (
    CpuTrainer,
    is_supported,
    read_outer,
    read_predictions,
)
from fedunfold.engines.simulation.backends.cpu.permutations import last_rows, shuffle_rows
from fedunfold.engines.simulation.backends.cpu.sparse_rows import Rows

__all__ = [
    "CpuTrainer",
    "Rows",
    "is_built",
    "is_supported",
    "last_rows",
    "read_outer",
    "read_predictions",
    "shuffle_rows",
]

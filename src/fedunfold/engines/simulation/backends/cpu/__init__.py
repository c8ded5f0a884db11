"""On a CPU: a round's whole local training in one call, for stacks of linear layers of any depth."""

from fedunfold.engines.simulation.backends.cpu.bindings import is_built
from fedunfold.engines.simulation.backends.cpu.local_training import CpuTrainer, evaluate_outer, is_supported, predict
from fedunfold.engines.simulation.backends.cpu.permutations import last_rows, shuffle_rows
from fedunfold.engines.simulation.backends.cpu.sparse_rows import SparseRows

__all__ = [
    "CpuTrainer",
    "SparseRows",
    "evaluate_outer",
    "is_built",
    "is_supported",
    "last_rows",
    "predict",
    "shuffle_rows",
]

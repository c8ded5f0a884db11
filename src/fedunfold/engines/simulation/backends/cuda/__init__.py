"""On a GPU: a round's whole local training in one launch, for stacks of up to three linear layers."""

from fedunfold.engines.simulation.backends.cuda.jit import multiprocessors
from fedunfold.engines.simulation.backends.cuda.local_training import CudaTrainer, is_supported

__all__ = ["CudaTrainer", "is_supported", "multiprocessors"]

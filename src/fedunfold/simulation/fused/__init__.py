"""On a GPU: a round's whole local walk in one launch, for stacks of up to three linear layers."""

from fedunfold.simulation.fused.compiling import multiprocessors
from fedunfold.simulation.fused.walk import FusedWalk, can_walk

__all__ = ["FusedWalk", "can_walk", "multiprocessors"]

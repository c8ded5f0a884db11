"""On a CPU: a round's whole local walk in one call, for stacks of linear layers of any depth."""

from fedunfold.simulation.native.library import is_built
from fedunfold.simulation.native.rows import Rows
from fedunfold.simulation.native.shuffling import last_rows, shuffle_rows
from fedunfold.simulation.native.walk import NativeWalk, can_walk, read_outer, read_predictions

__all__ = ["NativeWalk", "Rows", "can_walk", "is_built", "last_rows", "read_outer", "read_predictions", "shuffle_rows"]

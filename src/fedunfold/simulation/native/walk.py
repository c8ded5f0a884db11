"""The walk of a round in one call of compiled code."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.native.library import TYPES, Round, call, is_built
from fedunfold.simulation.native.rows import Rows
from fedunfold.simulation.schedule import Schedule
from fedunfold.simulation.walk import OuterTerms, Tally
from fedunfold.updates import LocalUpdate

WORTH_THREADS = 5_000_000
"""Multiplications in a forward pass over a round's minibatches, above which a second thread is worth its start."""


def can_walk(x: Tensor) -> bool:
    """Whether rounds on data x can be called."""
    return x.device.type == "cpu" and x.dtype in TYPES and is_built()


@dataclass(frozen=True)
class NativeWalk:
    """What `Walk` does, for stacks of linear layers on a CPU.

    Every lane is walked by one thread at a time, so that its numbers do not depend on how many threads there are.
    """

    stack: LinearStack
    rows: Rows
    y: Tensor
    schedule: Schedule
    step_sizes: Tensor
    update: LocalUpdate
    outer: OuterTerms | None
    threads: int

    def forward(self, start: Tensor, tally: Tally) -> Tensor:
        """w_k of every lane [L, d] from w^(t) of every lane, adding up losses and outer gradients."""
        models = start.new_empty(start.shape)
        round = self._round(start, models)
        round.losses, round.sums = _pointer(tally.losses, start), _pointer(tally.outer_gradients, start)
        call("forward", start.dtype, round)
        return models

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """dL/dw^(t) through every lane, given dL/dw_k."""
        adjoint = adjoint.clone(memory_format=torch.contiguous_format)
        call("backward", start.dtype, self._round(start, adjoint))
        return adjoint

    def can_walk_back(self, memory_budget: int) -> bool:
        """Whether what is kept of every step, its activations and the layers above the first, is within the budget."""
        steps, lanes, rows = self.schedule.rows.shape
        units, above = sum(self._sizes[1:]), sum(shape.numel() for shape in self.stack.shapes[2:])
        return bool(steps * lanes * (rows * units + above) * self.rows.values.element_size() <= memory_budget)

    def _round(self, start: Tensor, models: Tensor) -> Round:
        schedule, rows, outer = self.schedule, self.rows, self.outer
        if start.stride(1) != 1 or schedule.counts.dtype != np.int32 or not schedule.counts.flags.c_contiguous:
            raise ValueError("models and counts are read row by row.")
        steps, lanes, most_rows = schedule.rows.shape
        return Round(
            layers=len(self._sizes) - 1,
            lanes=lanes,
            steps=steps,
            rows=most_rows,
            threads=self.threads if schedule.counts.sum() * models.shape[1] >= WORTH_THREADS else 1,
            start_stride=start.stride(0),
            along=outer is not None and not outer.loss.only_last_layer,
            mu=self.update.mu,
            sizes=self._sizes.ctypes.data,
            x=_pointer(rows.values, start),
            marks=None if rows.marks is None else rows.marks.ctypes.data,
            background=_pointer(rows.background, start),
            overlaps=_pointer(rows.overlaps, start),
            labels=_pointer(self.y, torch.int64),
            batches=_pointer(schedule.rows, torch.int32),
            counts=schedule.counts.ctypes.data,
            means=_pointer(schedule.means, start),
            step_sizes=_pointer(self.step_sizes, start),
            factors=_pointer(None if outer is None else outer.factors, start),
            class_weights=_pointer(None if outer is None else outer.class_weights, start),
            start=start.data_ptr(),
            models=_pointer(models, start),
        )

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Features, and the units of every layer."""
        weights = [shape for shape in self.stack.shapes if len(shape) == 2]
        return np.array([weights[0][1], *(shape[0] for shape in weights)], dtype=np.int64)


def _pointer(tensor: Tensor | None, like: Tensor | torch.dtype) -> int | None:
    """Where a tensor begins: all that compiled code knows of it."""
    if tensor is None:
        return None
    dtype = like.dtype if isinstance(like, Tensor) else like
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"compiled code reads contiguous numbers of the type {dtype}.")
    return tensor.data_ptr()

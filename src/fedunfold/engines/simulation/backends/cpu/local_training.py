"""The walk of a round in one call of compiled code."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, OuterWeights, StepSums
from fedunfold.engines.simulation.backends.cpu.bindings import TYPES, Round, call, is_built
from fedunfold.engines.simulation.backends.cpu.sparse_rows import Rows
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.local import sgd

WORTH_THREADS = 5_000_000
"""Multiplications in a forward pass over a round's minibatches, above which a second thread is worth its start."""
READERS = 8  # lanes that share what is only read, however many threads there are: sums keep their order
READ_AT_ONCE = 60  # rows of theirs at a time: whole tiles, and slopes that stay in the first cache
PADDING = 16  # at least what `gemm.hpp` pads columns to
LONG = 3_000_000_000
"""Multiplications above which one may want to interrupt the round: a good part of a second."""


def is_supported(x: Tensor) -> bool:
    """Whether rounds on data x can be called."""
    return x.device.type == "cpu" and x.dtype in TYPES and is_built()


@dataclass(frozen=True)
class CpuTrainer:
    """What `TorchTrainer` does, for stacks of linear layers on a CPU.

    Every lane is walked by one thread at a time, so that its numbers do not depend on how many threads there are.
    """

    uses_torch_threads: ClassVar[bool] = False

    stack: MLPKernel
    rows: Rows
    y: Tensor
    batches: DeviceBatchPlan
    step_sizes: Tensor
    optimizer: LocalOptimizer
    outer: OuterWeights | None
    threads: int

    def forward(self, start: Tensor, tally: StepSums) -> Tensor:
        """w_k of every lane [L, d] from w^(t) of every lane, adding up losses and outer gradients."""
        start = start if start.stride(1) == 1 else start.contiguous()
        # Memory of numpy's, because torch's is aligned: one round's, given back, would be too small for the next.
        models = torch.from_numpy(np.empty(start.shape, start.new_empty(0).numpy().dtype))
        round, lanes = self._round(start, models), len(start)
        round.losses = self._pointer(tally.losses, 2, lanes)
        round.sums = self._pointer(tally.outer_gradients, *start.shape)
        call("forward", start.dtype, round, is_long=self._multiplications >= LONG)
        return models

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """dL/dw^(t) through every lane, given dL/dw_k."""
        start = start if start.stride(1) == 1 else start.contiguous()
        adjoint = adjoint.clone(memory_format=torch.contiguous_format)
        call("backward", start.dtype, self._round(start, adjoint), is_long=self._multiplications >= LONG)
        return adjoint

    def predictions(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted class argmax_c z_ic and cross-entropy log Σ_c e^{z_ic} − z_{i y_i} of every row of the schedule
        [S, L, B], at a model w [d] that does not move."""
        shape = self.batches.rows.shape
        predicted, losses = self.y.new_empty(shape), model.new_empty(shape)
        start = model.contiguous().expand(shape[1], -1)
        round = self._round(start)
        round.predicted, round.row_losses = _pointer(predicted, torch.int64, *shape), self._pointer(losses, *shape)
        call("predict", model.dtype, round, is_long=self._multiplications >= LONG)
        return predicted, losses

    def supports_backward(self, memory_budget: int) -> bool:
        """Whether what is kept is within the budget: of every step its activations and the layers above the first; of
        every lane the model and the adjoint, and with prox the anchor and its gain."""
        steps, lanes, rows = self.batches.rows.shape
        padded = [-(-units // PADDING) * PADDING for units in self._sizes[1:].tolist()]
        sizes = [(below + 1) * units for below, units in zip(self._sizes[:-1].tolist(), padded, strict=True)]
        kept = steps * (rows * sum(padded) + sum(sizes[1:])) + (4 if self.optimizer.fused_mu else 2) * sum(sizes)
        return bool(lanes * kept * self.rows.values.element_size() <= memory_budget)

    def _round(self, start: Tensor, models: Tensor | None = None) -> Round:
        """All but what a walk leaves beside the models. Whatever is not as compiled code takes it to be is refused."""
        schedule, rows, outer = self.batches, self.rows, self.outer
        steps, lanes, most_rows = schedule.rows.shape
        samples, features = rows.values.shape
        size = self.stack.layout.num_params
        if start.shape != (lanes, size) or start.dtype != rows.values.dtype or features != self._sizes[0]:
            raise ValueError(f"models of {size} numbers over {self._sizes[0]} features are walked, not these.")
        if schedule.counts.dtype != np.int32 or not schedule.counts.flags.c_contiguous:
            raise ValueError("counts are read row by row.")
        return Round(
            layers=len(self._sizes) - 1,
            lanes=lanes,
            steps=steps,
            rows=most_rows,
            threads=self.threads if self._multiplications >= WORTH_THREADS else 1,
            start_stride=start.stride(0),
            along=outer is not None and not outer.loss.only_final,
            mu=self.optimizer.fused_mu,
            sizes=self._sizes.ctypes.data,
            x=self._pointer(rows.values, samples, features),
            marks=None if rows.marks is None else rows.marks.ctypes.data,
            background=self._pointer(rows.background, features),
            overlaps=self._pointer(rows.overlaps, samples),
            labels=_pointer(self.y, torch.int64, samples),
            batches=_pointer(schedule.rows, torch.int32, steps, lanes, most_rows),
            counts=schedule.counts.ctypes.data,
            means=self._pointer(schedule.means, steps, lanes, most_rows),
            step_sizes=self._pointer(self.step_sizes, lanes),
            factors=self._pointer(None if outer is None else outer.factors, lanes),
            class_weights=self._pointer(None if outer is None else outer.class_weights, int(self._sizes[-1])),
            start=start.data_ptr(),
            models=self._pointer(models, lanes, size),
        )

    def _pointer(self, tensor: Tensor | None, *shape: int) -> int | None:
        return _pointer(tensor, self.rows.values.dtype, *shape)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Features, and the units of every layer."""
        weights = [shape for shape in self.stack.layout.shapes if len(shape) == 2]
        return np.array([weights[0][1], *(shape[0] for shape in weights)], dtype=np.int64)

    @cached_property
    def _multiplications(self) -> int:
        """In a forward pass over all minibatches, of which a way back takes several."""
        return int(self.batches.counts.sum()) * self.stack.layout.num_params


def read_outer(
    stack: MLPKernel, rows: Rows, y: Tensor, model: Tensor, chosen: np.ndarray, coefficients: Tensor, threads: int
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i ce_i(w) over chosen rows at a model w that does not move, and its gradient: a walk in steps of size 0."""
    schedule = _schedule(chosen, coefficients)
    lanes = len(schedule.order)
    ones = coefficients.new_ones(lanes)
    terms = OuterWeights(OUTER_LOSSES.make("path"), ones, None)
    gradients = model.new_zeros(lanes, len(model))
    tally = StepSums(ones.new_empty(2, lanes), None, gradients)
    walk = CpuTrainer(stack, rows, y, schedule, ones * 0, sgd(), terms, threads)
    walk.forward(model.expand(lanes, -1), tally)
    return tally.losses[1].sum(), gradients.sum(0)


def read_predictions(
    stack: MLPKernel, rows: Rows, y: Tensor, model: Tensor, chosen: np.ndarray, threads: int
) -> tuple[Tensor, Tensor]:
    """Predicted class and cross-entropy of chosen rows at a model w that does not move."""
    schedule = _schedule(chosen, model.new_ones(len(chosen)))
    no_steps = model.new_zeros(len(schedule.order))
    walk = CpuTrainer(stack, rows, y, schedule, no_steps, sgd(), None, threads)
    predicted, losses = walk.predictions(model)
    return predicted.flatten()[: len(chosen)], losses.flatten()[: len(chosen)]


def _schedule(chosen: np.ndarray, coefficients: Tensor) -> DeviceBatchPlan:
    """Chosen rows in the order given, dealt out to lanes that only read."""
    lanes = min(READERS, len(chosen))
    steps = -(-len(chosen) // (lanes * READ_AT_ONCE))
    shape = (steps, lanes, READ_AT_ONCE)
    batches, means = np.zeros(math.prod(shape), dtype=np.int32), coefficients.new_zeros(math.prod(shape))
    batches[: len(chosen)], means[: len(chosen)] = chosen, coefficients
    left = len(chosen) - READ_AT_ONCE * np.arange(steps * lanes)
    counts = np.clip(left, 0, READ_AT_ONCE).astype(np.int32).reshape(steps, lanes)
    minibatches = torch.from_numpy(batches).view(shape), counts, means.view(shape)
    return DeviceBatchPlan(tuple(range(lanes)), tuple((counts > 0).sum(1).tolist()), *minibatches)


def _pointer(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Where a tensor begins: all that compiled code knows of it."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"compiled code reads {list(shape)} contiguous numbers of the type {dtype} here.")
    return tensor.data_ptr()

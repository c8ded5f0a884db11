"""Local training of a cohort, its backward pass and evaluation, each in one call of compiled code."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, LocalTrainer, StepSums
from fedunfold.engines.simulation.backends.cpu.bindings import TYPES, CallArgs, Name, call, is_built
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.local import sgd

MAX_NONZERO = 1 / 3
"""Of all entries, how many may differ from the background for it to be left out."""
MIN_EQUAL = 0.1
"""Of a column, how many must be its lowest for that to be background: an outlier is not, and would drown the others."""


@dataclass(frozen=True)
class SparseRows:
    """Rows x_i + c of which x_i is mostly 0.

    Images and tables with one column for each category are mostly background, a value that a column has nearly
    everywhere and that is its lowest; scaled or not, only products with what differs from it are computed. Dense data
    have neither `nonzero` nor a background, and are not copied.

    Attributes:
        values: x_i [N, features].
        nonzero: A bit for every entry of x_i that is not 0, in words of 64 features; None for dense data.
        background: c [features]; None where it is 0.
        overlaps: x_i · c [N]; None where c is 0.
    """

    values: Tensor
    nonzero: np.ndarray | None = None
    background: Tensor | None = None
    overlaps: Tensor | None = None

    @classmethod
    def from_dense(cls, x: Tensor) -> "SparseRows":
        """Split rows into background and the rest, if enough of them is background.

        Args:
            x: The data [N, …], flattened to [N, features].
        """
        flat = x.flatten(1)
        lowest = flat.amin(0)
        background = torch.where((flat == lowest).sum(0) >= MIN_EQUAL * len(flat), lowest, 0)
        differs = (flat != background).numpy()
        if differs.mean() > MAX_NONZERO:
            return cls(flat)
        to_words = -differs.shape[1] % 64
        nonzero = np.packbits(np.pad(differs, ((0, 0), (0, to_words))), axis=1, bitorder="little")
        if not background.any():
            return cls(flat, nonzero)
        values = flat - background
        return cls(values, nonzero, background, torch.mv(values, background))


WORTH_THREADS = 5_000_000
"""Multiplications in a forward pass over a round's minibatches, above which a second thread is worth its start."""
EVALUATION_SLOTS = 8  # that share the rows to evaluate, however many threads there are: sums have a fixed order
EVALUATION_ROWS = 60  # of theirs at a time: whole tiles, and output gradients that stay in the first cache
PADDING = 16  # at least what `gemm.hpp` pads columns to
LONG = 3_000_000_000
"""Multiplications above which one may want to interrupt the round: a good part of a second."""


def is_supported(x: Tensor) -> bool:
    """Whether compiled code can train on data x.

    Args:
        x: The data, on the device and in the type of the computation.
    """
    return x.device.type == "cpu" and x.dtype in TYPES and is_built()


@dataclass(frozen=True)
class CpuTrainer(LocalTrainer):
    """What `TorchTrainer` does, for stacks of linear layers on a CPU.

    Every client slot is trained by one thread at a time, so that its numbers do not depend on how many threads there
    are.

    Attributes:
        kernel: The stack of linear layers.
        rows: The data of all clients.
        threads: How many threads may be used.
    """

    kernel: MLPKernel
    rows: SparseRows
    threads: int

    def forward(self, start: Tensor, sums: StepSums) -> Tensor:
        """Train every slot in one call."""
        start = start if start.stride(1) == 1 else start.contiguous()
        # Memory of numpy's, because torch's is aligned: one round's, given back, would be too small for the next.
        models = torch.from_numpy(np.empty(start.shape, start.new_empty(0).numpy().dtype))
        args, slots = self._args(start, models), len(start)
        args.losses = self._pointer(sums.losses, 2, slots)
        args.sums = self._pointer(sums.outer_gradients, *start.shape)
        self._call("forward", args)
        return models

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """Train every slot again and differentiate through it, in one call."""
        start = start if start.stride(1) == 1 else start.contiguous()
        adjoint = adjoint.clone(memory_format=torch.contiguous_format)
        self._call("backward", self._args(start, adjoint))
        return adjoint

    def supports_backward(self, memory_budget: int) -> bool:
        """Whether what the backward pass saves is within the budget.

        That is, of every step its activations and the layers above the first; of every slot the model and the adjoint,
        and with prox the anchor and its adjoint.

        Args:
            memory_budget: Bytes.
        """
        steps, slots, rows = self.batches.rows.shape
        padded = [-(-units // PADDING) * PADDING for units in self._sizes[1:].tolist()]
        sizes = [(below + 1) * units for below, units in zip(self._sizes[:-1].tolist(), padded, strict=True)]
        saved = steps * (rows * sum(padded) + sum(sizes[1:])) + (4 if self.optimizer.fused_mu else 2) * sum(sizes)
        return bool(slots * saved * self.rows.values.element_size() <= memory_budget)

    def _args(self, start: Tensor, models: Tensor | None = None) -> CallArgs:
        """All but the results beside the models. Whatever is not as compiled code takes it to be is refused."""
        batches, rows, outer = self.batches, self.rows, self.outer
        steps, slots, batch_size = batches.rows.shape
        samples, features = rows.values.shape
        size = self.kernel.layout.num_params
        if start.shape != (slots, size) or start.dtype != rows.values.dtype or features != self._sizes[0]:
            raise ValueError(f"models of {size} numbers over {self._sizes[0]} features are trained, not these.")
        if batches.counts.dtype != np.int32 or not batches.counts.flags.c_contiguous:
            raise ValueError("counts are read row by row.")
        return CallArgs(
            layers=len(self._sizes) - 1,
            slots=slots,
            steps=steps,
            rows=batch_size,
            threads=self.threads if self._multiplications >= WORTH_THREADS else 1,
            start_stride=start.stride(0),
            outer_on_path=outer is not None and not outer.loss.only_final,
            mu=self.optimizer.fused_mu,
            sizes=self._sizes.ctypes.data,
            x=self._pointer(rows.values, samples, features),
            nonzero=None if rows.nonzero is None else rows.nonzero.ctypes.data,
            background=self._pointer(rows.background, features),
            overlaps=self._pointer(rows.overlaps, samples),
            labels=_pointer(self.y, torch.int64, samples),
            batches=_pointer(batches.rows, torch.int32, steps, slots, batch_size),
            counts=batches.counts.ctypes.data,
            means=self._pointer(batches.means, steps, slots, batch_size),
            step_sizes=self._pointer(self.step_sizes, slots),
            factors=self._pointer(None if outer is None else outer.factors, slots),
            class_weights=self._pointer(None if outer is None else outer.class_weights, int(self._sizes[-1])),
            start=start.data_ptr(),
            models=self._pointer(models, slots, size),
        )

    def _call(self, name: Name, args: CallArgs) -> None:
        call(name, self.rows.values.dtype, args, is_long=self._multiplications >= LONG)

    def _pointer(self, tensor: Tensor | None, *shape: int) -> int | None:
        return _pointer(tensor, self.rows.values.dtype, *shape)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Features, and the units of every layer."""
        return np.array(self.kernel.sizes, dtype=np.int64)

    @cached_property
    def _multiplications(self) -> int:
        """In a forward pass over all minibatches, of which a backward pass takes several."""
        return int(self.batches.counts.sum()) * self.kernel.layout.num_params


@dataclass(frozen=True)
class CpuEvaluator:
    """Reads chosen rows at fixed parameters w.

    Attributes:
        kernel: The stack of linear layers.
        x: The data.
        y: Their labels.
        threads: How many threads may be used.
    """

    kernel: MLPKernel
    x: Tensor
    y: Tensor
    threads: int

    @cached_property
    def rows(self) -> SparseRows:
        """x as compiled code reads it, which relies on labels being classes."""
        classes = self.kernel.sizes[-1]
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < classes:
            raise ValueError(f"there are labels other than 0 to {classes - 1}.")
        return SparseRows.from_dense(self.x)

    def outer(self, model: Tensor, chosen: np.ndarray, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ce_i(w) over chosen rows, and its gradient.

        Args:
            model: w [d].
            chosen: Which rows of the data [n].
            coefficients: c_i of every chosen row [n].

        Returns:
            The sum and its gradient [d].
        """
        trainer = self._trainer(chosen, coefficients)
        start = model.contiguous().expand(len(trainer.batches.order), -1)
        losses, gradients = model.new_empty(len(start)), model.new_zeros(start.shape)
        args = trainer._args(start)
        args.losses, args.sums = losses.data_ptr(), gradients.data_ptr()
        trainer._call("evaluate", args)
        return losses.sum(), gradients.sum(0)

    def predict(self, model: Tensor, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """argmax_c z_ic and log Σ_c e^{z_ic} − z_{i y_i}: predicted class and cross-entropy of chosen rows.

        Args:
            model: w [d].
            chosen: Which rows of the data [n].

        Returns:
            The classes and the losses, [n] each.
        """
        trainer = self._trainer(chosen, model.new_ones(len(chosen)))
        start = model.contiguous().expand(len(trainer.batches.order), -1)
        numel = trainer.batches.rows.numel()
        predicted, losses = self.y.new_empty(numel), model.new_empty(numel)
        args = trainer._args(start)
        args.predicted, args.row_losses = predicted.data_ptr(), losses.data_ptr()
        trainer._call("predict", args)
        return predicted[: len(chosen)], losses[: len(chosen)]

    def _trainer(self, chosen: np.ndarray, coefficients: Tensor) -> CpuTrainer:
        """Chosen rows in the order given, divided among slots that take no step."""
        slots = min(EVALUATION_SLOTS, len(chosen))
        steps = -(-len(chosen) // (slots * EVALUATION_ROWS))
        shape = (steps, slots, EVALUATION_ROWS)
        places, means = np.zeros(math.prod(shape), dtype=np.int32), coefficients.new_zeros(math.prod(shape))
        places[: len(chosen)], means[: len(chosen)] = chosen, coefficients
        left = len(chosen) - EVALUATION_ROWS * np.arange(steps * slots)
        counts = np.clip(left, 0, EVALUATION_ROWS).astype(np.int32).reshape(steps, slots)
        minibatches = torch.from_numpy(places).view(shape), counts, means.view(shape)
        batches = DeviceBatchPlan(tuple(range(slots)), tuple((counts > 0).sum(1).tolist()), *minibatches)
        rates = coefficients.new_zeros(slots)
        return CpuTrainer(self.kernel, self.y, batches, rates, sgd(), None, self.rows, self.threads)


def _pointer(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """The address of a tensor: all that compiled code knows of it."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"compiled code reads {list(shape)} contiguous numbers of the type {dtype} here.")
    return tensor.data_ptr()

"""The walk of a round in one launch, where the model and the device allow it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, OuterWeights, StepSums
from fedunfold.engines.simulation.backends.cuda.jit import PARTS, Name, Shape, compiled, multiprocessors, shared_memory
from fedunfold.engines.simulation.batching import upload
from fedunfold.engines.simulation.kernels.mlp import MLPKernel


def is_supported(stack: MLPKernel, rows: int, x: Tensor) -> bool:
    """Whether a round on data x with minibatches of some rows can be one launch."""
    single = x.device.type == "cuda" and x.dtype == torch.float32
    return single and _shape(stack, rows).fits(shared_memory(x.device))


@dataclass(frozen=True)
class CudaTrainer:
    """What `TorchTrainer` does, for stacks of linear layers on a GPU."""

    uses_torch_threads: ClassVar[bool] = False

    stack: MLPKernel
    x: Tensor
    y: Tensor
    batches: DeviceBatchPlan
    step_sizes: Tensor
    optimizer: LocalOptimizer
    outer: OuterWeights | None

    def forward(self, start: Tensor, tally: StepSums) -> Tensor:
        """w_k of every lane [L, d] from w^(t) of every lane, adding up losses and outer gradients."""
        models = torch.empty_like(start, memory_format=torch.contiguous_format)
        self._launch(start, models, tally)
        return models

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """dL/dw^(t) through every lane, given dL/dw_k: the walk again, kept on a tape, and then back along it."""
        shape = self._shape(sums=False)
        tape = start.new_empty(len(self.batches.active), len(start), shape.record)
        self._launch(start, tape, StepSums(start.new_empty(2, len(start))), tape=True)
        adjoint = adjoint.clone(memory_format=torch.contiguous_format)
        outer = self.outer is not None and not self.outer.loss.only_final
        launch = compiled("backward", shape, self.x.device)
        launch(len(start), [*self._round, tape, adjoint, len(start), int(outer)])
        return adjoint

    def supports_backward(self, memory_budget: int) -> bool:
        shape = self._shape(sums=False)
        kept = len(self.batches.active) * len(self.batches.order) * shape.record * self.x.element_size()
        return shape.fits_backward(shared_memory(self.x.device)) and kept <= memory_budget

    def _launch(self, start: Tensor, to: Tensor, tally: StepSums, *, tape: bool = False) -> None:
        """The walk; `to` gets the last model of every lane, or what is on the `tape` of every step."""
        lanes, start, sums = len(start), start.contiguous(), tally.outer_gradients
        shape = self._shape(sums=sums is not None, tape=tape)
        name: Name = "pair" if not tape and self._goes_in_pairs(shape, lanes) else "forward"
        losses = start.new_empty(2, lanes, shape.sums_of_losses(name))
        compiled(name, shape, self.x.device)(
            lanes,
            [
                *self._round,
                to,
                start,
                losses[0],
                losses[1],
                start if sums is None else sums,
                start if sums is None else start.new_zeros(lanes * shape.scratch),
                lanes,
                float(self.optimizer.fused_mu or 0),
            ],
        )
        torch.sum(losses, 2, out=tally.losses)
        if self.outer is None or self.outer.loss.only_final:
            tally.losses[1] = 0

    def _goes_in_pairs(self, shape: Shape, lanes: int) -> bool:
        """Eight programs make a lane's walk sooner than two, as long as there is room for all lanes at once."""
        crowded = lanes * PARTS > multiprocessors(self.x.device)
        return crowded and self.x.numel() < 2**32 and shape.fits_pair(shared_memory(self.x.device))

    def _shape(self, *, sums: bool, tape: bool = False) -> Shape:
        balanced = self.outer is not None and self.outer.class_weights is not None
        plain = _shape(self.stack, self.batches.rows.shape[2])
        return replace(plain, prox=bool(self.optimizer.fused_mu), balanced=balanced, sums=sums, tape=tape)

    @cached_property
    def _round(self) -> tuple[Tensor, ...]:
        """Data, minibatches and coefficients."""
        outer, ones = self.outer, self.step_sizes
        factors = ones if outer is None else outer.factors
        class_weights = ones if outer is None or outer.class_weights is None else outer.class_weights
        schedule = self.batches
        steps = upload((schedule.counts > 0).sum(0).astype(np.int32), self.x.device)
        return self.x, self.y, schedule.rows, schedule.means, steps, self.step_sizes, factors, class_weights


def _shape(stack: MLPKernel, rows: int) -> Shape:
    weights = [shape for shape in stack.layout.shapes if len(shape) == 2]
    return Shape(weights[0][1], tuple(shape[0] for shape in weights), rows)

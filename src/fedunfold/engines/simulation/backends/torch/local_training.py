"""Local training of one round in torch, forward and backward, for all its clients at once.

Forward (c_k folds into the step size η_k = η c_k):   w^{τ+1} = w^τ − η_k (∇ℓ_b(w^τ) + μ (w^τ − w^(t)))

Backward, from p = dL/dw^{τ_k}, for τ = τ_k−1 … 0:    p⁻ = p
    p = p⁻ − η_k (H_b(w^τ) + μ I) p⁻ + ∇ℓ^out_b(w^τ),   and w^(t) itself gains η_k μ p⁻

and for any other local optimiser, with σ = dL/dstate, by the derivatives of its step (`LocalOptimizer`).

The backward pass needs the iterates in reverse. They are computed again: all stored at once while they fit the memory
budget, otherwise in √S segments from √S checkpoints, so that memory grows with the root of the steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.engines.simulation.backends.base import LocalTrainer, StepSums
from fedunfold.engines.simulation.backends.torch.stepping import Iterate, ProximalStepping, StatefulStepping, Stepping
from fedunfold.engines.simulation.batching import Samples
from fedunfold.engines.simulation.kernels.base import Batch, OuterSlope, Parameters, flatten, unflatten, views


@dataclass(frozen=True)
class _SampleLosses:
    """Sums as the steps fill them: every sample's losses [S, L, B], summed up in the end, and gradients parameter by
    parameter. An outer loss that is the training loss has no losses of its own."""

    losses: Tensor
    outer_losses: Tensor | None
    outer_weights: Tensor | None
    gradients: Parameters | None
    outer_gradients: Parameters | None


@dataclass(frozen=True)
class TorchTrainer(LocalTrainer):
    """The participating clients of one round.

    Attributes:
        samples: Those of all clients.
        memory_budget: Bytes of iterates that the backward pass may store.
        curvature: Whether the backward pass counts the curvature of the training loss.
        corrections: v_k of every slot, [L, d], where the local optimiser has control variates.
    """

    uses_torch_threads: ClassVar[bool] = True

    samples: Samples
    memory_budget: int
    curvature: bool = True
    corrections: Tensor | None = None

    def forward(self, start: Tensor, sums: StepSums) -> Tensor:
        """w_k of every slot [L, d] from w^(t) of every slot, summing up losses and gradients."""
        means, shapes = self.batches.means, self._shapes
        own, outer, along = sums.gradients, sums.outer_gradients, self.path_outer
        met = _SampleLosses(
            torch.zeros_like(means),
            torch.zeros_like(means) if along is not None and not along.loss.is_training_loss else None,
            None if along is None else torch.zeros_like(means),
            None if own is None else views(own, shapes),
            None if outer is None else views(outer, shapes),
        )
        stepping = self._stepping(start)
        iterate = stepping.start()
        self.samples.expect(self.batches.rows, self.batches.counts)
        for step in range(len(self.batches.active)):
            self._step_(step, stepping, iterate, met)
        torch.sum(met.losses * means, (0, 2), out=sums.losses[0])
        if met.outer_weights is None:
            sums.losses[1] = 0
        else:
            values = met.losses if met.outer_losses is None else met.outer_losses
            torch.sum(values * met.outer_weights, (0, 2), out=sums.losses[1])
        return flatten(iterate.parameters)

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """dL/dw^(t) through every slot, given dL/dw_k."""
        stepping = self._stepping(start)
        stepping.start_backward(unflatten(adjoint, self._shapes))
        for step, iterate in self._iterates_in_reverse(stepping):
            batch, means = self._minibatch(step)
            stepping.backward_step_(iterate, batch, means, self._outer_slope(batch, means))
        return stepping.end_backward()

    def _stepping(self, start: Tensor) -> Stepping:
        parts = (self.kernel, self.optimizer, self.step_sizes, unflatten(start, self._shapes))
        if self.optimizer.fused_mu is None or not self.curvature:
            return StatefulStepping(*parts, self.curvature, self.corrections)
        return ProximalStepping(*parts)

    def _iterates_in_reverse(self, stepping: Stepping) -> Iterator[tuple[int, Iterate]]:
        """Every step with the iterate it began from, the last one first."""
        total, first = len(self.batches.active), stepping.start()
        length = total if total * first.nbytes <= self.memory_budget else math.isqrt(total - 1) + 1
        checkpoints = [first]
        for begin in range(0, total - length, length):
            iterate = checkpoints[-1].clone()
            for step in range(begin, begin + length):
                self._step_(step, stepping, iterate)
            checkpoints.append(iterate)
        for begin in reversed(range(0, total, length)):
            iterate, segment = checkpoints.pop(), []
            for step in range(begin, min(begin + length, total)):
                segment.append((step, iterate.clone(self.batches.active[step])))
                self._step_(step, stepping, iterate)
            while segment:
                yield segment.pop()

    def _step_(self, step: int, stepping: Stepping, iterate: Iterate, met: _SampleLosses | None = None) -> None:
        """One step of the slots that still train, noting losses and gradients where there is a place for them."""
        batch, means = self._minibatch(step)
        live, outer = len(means), self.path_outer
        task = self.kernel.task
        outputs, pullback = self.kernel.local_vjp([p[:live] for p in iterate.parameters], batch)
        losses, slopes = task.values(outputs, batch.y, batch.counts)
        if met is not None:
            met.losses[step, :live] = losses
            if met.gradients is not None:
                pullback(slopes(means), [p[:live] for p in met.gradients])
        if met is not None and outer is not None:
            assert met.outer_weights is not None
            weights = met.outer_weights[step, :live] = outer.coefficients(task, batch.y, means)
            outer_slopes = slopes
            if met.outer_losses is not None:
                met.outer_losses[step, :live], outer_slopes = outer.loss.values(task, outputs, batch.y, batch.counts)
            if met.outer_gradients is not None:
                pullback(outer_slopes(weights), [p[:live] for p in met.outer_gradients])
        stepping.step_(iterate, slopes, means, pullback)

    def _outer_slope(self, batch: Batch, means: Tensor) -> OuterSlope:
        outer = self.path_outer
        if outer is None:
            return None
        task = self.kernel.task
        weights = outer.coefficients(task, batch.y, means)
        return lambda outputs: outer.loss.values(task, outputs, batch.y, batch.counts)[1](weights)

    def _minibatch(self, step: int) -> tuple[Batch, Tensor]:
        """The step's minibatches of the slots that still train, and 1/|b| per sample (0 for padding)."""
        live = self.batches.active[step]
        rows = self.batches.rows[step, :live]
        counts = self.batches.counts[step, :live].tolist()
        seeds = self.batches.seeds(step) if self.kernel.is_stochastic else None
        batch = Batch(*self.samples.minibatches(rows, counts), counts, seeds)
        return batch, self.batches.means[step, :live]

    @cached_property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return self.kernel.layout.shapes + self.kernel.layout.buffer_shapes

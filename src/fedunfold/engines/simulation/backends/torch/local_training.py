"""The local walk of one round, forwards and backwards, for all present clients at once.

Forwards (c_k folds into the step size η_k = η c_k):   w^{τ+1} = w^τ − η_k (∇ℓ_b(w^τ) + μ (w^τ − w^(t)))

Backwards, from p = dL/dw^{τ_k}, for τ = τ_k−1 … 0:    p⁻ = p
    p = p⁻ − η_k (H_b(w^τ) + μ I) p⁻ + ∇ℓ^out_b(w^τ),   and w^(t) itself gains η_k μ p⁻

The walk back needs the iterates in reverse. They are replayed: all kept at once while they fit the memory
budget, otherwise in √S segments from √S checkpoints, so that memory grows with the root of the steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedunfold.core.task import OuterLoss, cross_entropy
from fedunfold.engines.simulation.kernels.base import Batch, Kernel, Parameters, flatten, unflatten, views
from fedunfold.engines.simulation.schedule import DeviceBatchPlan
from fedunfold.local.optimizers import LocalOptimizer


@dataclass
class OuterWeights:
    """How each lane's minibatches enter the outer loss: kind, client factor [L], class weights [C]."""

    loss: OuterLoss
    factors: Tensor
    class_weights: Tensor | None

    def coefficients(self, labels: Tensor, means: Tensor) -> Tensor:
        """What every sample's loss is multiplied with, [..., L, B]; `means` is 1/|b|, 0 for padding."""
        weights = means * self.factors[: means.shape[-2], None]
        return weights if self.class_weights is None else weights * self.class_weights[labels]


@dataclass
class StepSums:
    """What a forward walk fills in, per lane: the sums of the training and the outer losses [2, L], and adds to where
    they are given, sums of gradients [L, d]."""

    losses: Tensor
    gradients: Tensor | None = None
    outer_gradients: Tensor | None = None

    def of(self, lanes: Tensor | slice) -> "StepSums":
        """That of some lanes."""
        own, outer = self.gradients, self.outer_gradients
        return StepSums(
            self.losses[:, lanes], None if own is None else own[lanes], None if outer is None else outer[lanes]
        )


@dataclass(frozen=True)
class _Seen:
    """A tally as the steps fill it: every sample's losses [S, L, B], summed up in the end, and gradients parameter by
    parameter. An outer loss that is the training loss has no losses of its own."""

    losses: Tensor
    outer_losses: Tensor | None
    gradients: Parameters | None
    outer_gradients: Parameters | None


@dataclass(frozen=True)
class TorchTrainer:
    """The present clients of one round: their minibatches and step sizes."""

    kernel: Kernel
    x: Tensor
    y: Tensor
    schedule: DeviceBatchPlan
    step_sizes: Tensor
    update: LocalOptimizer
    outer: OuterWeights | None
    memory_budget: int

    def forward(self, start: Tensor, tally: StepSums) -> Tensor:
        """w_k of every lane [L, d] from w^(t) of every lane, adding up losses and gradients."""
        shapes, own, outer = self._shapes, tally.gradients, tally.outer_gradients
        parameters = unflatten(start, shapes)
        anchor = [p.clone() for p in parameters] if self.update.mu else None
        buffers = [torch.zeros_like(p) for p in parameters] if self.update.momentum else None
        means = self.schedule.means
        seen = _Seen(
            torch.zeros_like(means),
            torch.zeros_like(means) if self._along is not None and not self._along.loss.is_cross_entropy else None,
            None if own is None else views(own, shapes),
            None if outer is None else views(outer, shapes),
        )
        for step in range(len(self.schedule.active)):
            self._step_(step, parameters, anchor, buffers, seen)
        torch.sum(seen.losses * means, (0, 2), out=tally.losses[0])
        if self._along is None:
            tally.losses[1] = 0
        else:
            values = seen.losses if seen.outer_losses is None else seen.outer_losses
            torch.sum(values * self._along.coefficients(self._labels, means), (0, 2), out=tally.losses[1])
        return flatten(parameters)

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """dL/dw^(t) through every lane, given dL/dw_k."""
        total = len(self.schedule.active)
        length = total if total * adjoint.nbytes <= self.memory_budget else math.isqrt(total - 1) + 1
        anchor, pulled = unflatten(start, self._shapes), unflatten(adjoint, self._shapes)
        anchor_gain = [torch.zeros_like(p) for p in pulled] if self.update.mu else None

        checkpoints = [anchor]
        for begin in range(0, total - length, length):
            parameters = [p.clone() for p in checkpoints[-1]]
            for step in range(begin, begin + length):
                self._step_(step, parameters, anchor, None, None)
            checkpoints.append(parameters)

        for begin in reversed(range(0, total, length)):
            parameters = [p.clone() for p in checkpoints.pop()]
            iterates = []
            for step in range(begin, min(begin + length, total)):
                live = self.schedule.active[step]
                iterates.append([p[:live].clone() for p in parameters])
                self._step_(step, parameters, anchor, None, None)
            while iterates:
                self._step_back_(begin + len(iterates) - 1, iterates.pop(), pulled, anchor_gain)
        if anchor_gain is not None:
            torch._foreach_add_(pulled, anchor_gain)
        return flatten(pulled)

    def _step_(
        self,
        step: int,
        parameters: Parameters,
        anchor: Parameters | None,
        buffers: Parameters | None,
        seen: _Seen | None,
    ) -> None:
        batch, means = self._minibatch(step)
        live = len(means)
        current = [p[:live] for p in parameters]
        logits, pullback = self.kernel.local_vjp(current, batch)
        losses, slope = cross_entropy(logits, batch.y)
        if seen is not None:
            self._see(seen, step, batch, means, logits, losses, slope, pullback)

        rates = self.step_sizes[:live]
        if buffers is not None:
            moving = [b[:live].mul_(self.update.momentum) for b in buffers]
            pullback(slope.mul_(means.unsqueeze(-1)), moving)
            for p, b in zip(current, moving, strict=True):
                p.sub_(b * _per_lane(rates, b))
            return
        pull = None
        if self.update.mu and anchor is not None:
            trained = len(self.kernel.shapes)
            pull = [a[:live] - p for a, p in zip(anchor[:trained], current[:trained], strict=True)]
        pullback(slope.mul_(self._downhill[step, :live]), current)
        if pull is not None:
            for p, towards in zip(current[: len(pull)], pull, strict=True):
                p.add_(towards.mul_(_per_lane(rates * self.update.mu, towards)))

    def _step_back_(self, step: int, iterate: Parameters, adjoint: Parameters, anchor_gain: Parameters | None) -> None:
        batch, means = self._minibatch(step)
        live = len(means)
        rates = self.step_sizes[:live]
        current = [p[:live] for p in adjoint]
        pulled = None
        if anchor_gain is not None:
            pulled = [p * _per_lane(rates * self.update.mu, p) for p in current]
        self.kernel.apply_hvp_(iterate, current, batch, means * rates[:, None], self._outer_slope(batch, means))
        if pulled is not None and anchor_gain is not None:
            for p, gain, part in zip(current, anchor_gain, pulled, strict=True):
                p.sub_(part)
                gain[:live].add_(part)

    def _outer_slope(self, batch: Batch, means: Tensor) -> Callable[[Tensor], Tensor] | None:
        outer = self._along
        if outer is None:
            return None
        coefficients = outer.coefficients(batch.y, means).unsqueeze(-1)
        return lambda logits: outer.loss.values(logits, batch.y)[1].mul_(coefficients)

    def _see(
        self,
        seen: _Seen,
        step: int,
        batch: Batch,
        means: Tensor,
        logits: Tensor,
        losses: Tensor,
        slope: Tensor,
        pullback: Callable[[Tensor, Parameters], None],
    ) -> None:
        live = len(means)
        seen.losses[step, :live] = losses
        if seen.gradients is not None:
            pullback(slope * means.unsqueeze(-1), [p[:live] for p in seen.gradients])
        if self._along is None:
            return
        if seen.outer_losses is not None:
            seen.outer_losses[step, :live], slope = self._along.loss.values(logits, batch.y)
        if seen.outer_gradients is not None:
            coefficients = self._along.coefficients(batch.y, means)
            pullback(slope * coefficients.unsqueeze(-1), [p[:live] for p in seen.outer_gradients])

    def _minibatch(self, step: int) -> tuple[Batch, Tensor]:
        """The step's minibatches of the lanes still walking, and 1/|b| per sample (0 for padding).

        All steps read into the same memory: the rows of one are gone when the next is made.
        """
        live = self.schedule.active[step]
        rows = self.schedule.rows[step, :live]
        counts = self.schedule.counts[step, :live].tolist()
        x = self._rows_read[: rows.numel()]
        torch.index_select(self.x, 0, rows.flatten(), out=x)  # several times faster than indexing
        seeds = self.schedule.seeds(step) if self.kernel.is_stochastic else None
        batch = Batch(x.view(*rows.shape, *x.shape[1:]), self._labels[step, :live], counts, seeds)
        return batch, self.schedule.means[step, :live]

    @cached_property
    def _along(self) -> OuterWeights | None:
        """The outer loss, where the steps on the way are part of it."""
        return None if self.outer is None or self.outer.loss.only_last_layer else self.outer

    @cached_property
    def _downhill(self) -> Tensor:
        """−η_k/|b|, [S, L, B, 1]."""
        return (self.schedule.means * -self.step_sizes[:, None]).unsqueeze(-1)

    @cached_property
    def _rows_read(self) -> Tensor:
        return self.x.new_empty(self.schedule.rows[0].numel(), *self.x.shape[1:])

    @cached_property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return self.kernel.shapes + self.kernel.statistics

    @cached_property
    def _labels(self) -> Tensor:
        return self.y[self.schedule.rows]


def _per_lane(values: Tensor, like: Tensor) -> Tensor:
    """[L] shaped so that it multiplies every lane of `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))

"""One local step of all clients and its derivative: in place for SGD and prox, by autograd for any other optimiser."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.core.parts import LocalOptimizer, State
from fedunfold.core.row_losses import Slopes
from fedunfold.engines.simulation.kernels.base import Batch, Kernel, OuterSlope, Parameters, Pullback, flatten, views


@dataclass
class Iterate:
    """Where all slots stand.

    Attributes:
        parameters: Parameters and buffers, the slot on the leading axis.
        state: The local optimisers' states, [L, d] each.
    """

    parameters: Parameters
    state: State = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.parameters, *self.state))

    def clone(self, slots: int | None = None) -> "Iterate":
        """A copy of the first so many slots."""
        return Iterate([p[:slots].clone() for p in self.parameters], tuple(s[:slots].clone() for s in self.state))


class ProximalStepping:
    """w ← w − η_k (∇ℓ_b(w) + μ (w − w^(t))), in place; the steps of a round, then backward in reverse order."""

    def __init__(self, kernel: Kernel, optimizer: LocalOptimizer, step_sizes: Tensor, anchor: Parameters) -> None:
        self._kernel, self._mu, self._step_sizes, self._anchor = kernel, optimizer.fused_mu or 0.0, step_sizes, anchor
        self._trained = len(kernel.layout.shapes)
        self._adjoint: Parameters = []
        self._anchor_gain: Parameters = []

    def start(self) -> Iterate:
        """Where every slot begins."""
        return Iterate([p.clone() for p in self._anchor])

    def step_(self, iterate: Iterate, slopes: Slopes, means: Tensor, pullback: Pullback) -> None:
        """One step in place of the slots that still train.

        Args:
            iterate: Where all slots stand.
            slopes: Of the training loss in the outputs, with weights for the samples.
            means: 1/|b|.
            pullback: From slopes to gradients of the parameters.
        """
        live, rates = len(means), self._step_sizes[: len(means)]
        current = [p[:live] for p in iterate.parameters]
        trained = current[: self._trained] if self._mu else []
        pull = [anchor[:live] - p for anchor, p in zip(self._anchor, trained, strict=False)]
        pullback(slopes(means * -rates[:, None]), current)
        for p, towards in zip(trained, pull, strict=True):
            p.add_(towards.mul_(_per_slot(rates * self._mu, towards)))

    def start_backward(self, adjoint: Parameters) -> None:
        """From dL/dw_k, which may be changed in place."""
        self._adjoint = adjoint
        self._anchor_gain = [torch.zeros_like(p) for p in self._adjoint] if self._mu else []

    def backward_step_(self, iterate: Iterate, batch: Batch, means: Tensor, outer_slope: OuterSlope) -> None:
        """Through the step made at an iterate."""
        live, rates = len(means), self._step_sizes[: len(means)]
        current = [p[:live] for p in self._adjoint]
        pulled = [p * _per_slot(rates * self._mu, p) for p in current] if self._mu else []
        self._kernel.apply_hvp_(iterate.parameters, current, batch, means * rates[:, None], outer_slope)
        for p, gain, part in zip(current if self._mu else [], self._anchor_gain, pulled, strict=True):
            p.sub_(part)
            gain[:live].add_(part)

    def end_backward(self) -> Tensor:
        """dL/dw^(t) [L, d]."""
        for p, gain in zip(self._adjoint if self._mu else [], self._anchor_gain, strict=True):
            p.add_(gain)
        return flatten(self._adjoint)


class StatefulStepping:
    """Any local optimiser's pure step on parameters as vectors [L, d], differentiated by autograd over that step.

    With control variates the optimiser's state is v_k [L, d], which is given: a constant for the backward pass."""

    def __init__(
        self,
        kernel: Kernel,
        optimizer: LocalOptimizer,
        step_sizes: Tensor,
        anchor: Parameters,
        curvature: bool,
        corrections: Tensor | None = None,
    ) -> None:
        self._kernel, self._optimizer, self._curvature = kernel, optimizer, curvature
        self._start, self._step_sizes, self._anchor = anchor, step_sizes[:, None], flatten(anchor)
        self._shapes, self._trained = [p.shape[1:] for p in anchor], kernel.layout.num_params
        self._adjoint = self._anchor_gain = self._anchor.new_zeros(0)
        self._state_adjoint: State = ()
        self._given: State | None = None if corrections is None else (corrections[:, : self._trained],)

    def start(self) -> Iterate:
        state = self._optimizer.init(self._anchor[:, : self._trained]) if self._given is None else self._given
        return Iterate([p.clone() for p in self._start], state)

    def step_(self, iterate: Iterate, slopes: Slopes, means: Tensor, pullback: Pullback) -> None:
        live = len(means)
        gradient = self._gradient(slopes, means, pullback)
        params = flatten([p[:live] for p in iterate.parameters])[:, : self._trained]
        state = tuple(s[:live] for s in iterate.state)
        with torch.no_grad():
            params, after = self._optimizer.step(params, gradient, state, *self._constants(live))
        trained = len(self._kernel.layout.shapes)
        for p, new in zip(iterate.parameters, views(params, self._shapes[:trained]), strict=False):
            p[:live] = new
        for s, new in zip(iterate.state, after, strict=True):
            s[:live] = new

    def start_backward(self, adjoint: Parameters) -> None:
        self._adjoint = flatten(adjoint)
        self._anchor_gain = torch.zeros_like(self._adjoint[:, : self._trained])
        self._state_adjoint = tuple(torch.zeros_like(s) for s in self.start().state)

    def backward_step_(self, iterate: Iterate, batch: Batch, means: Tensor, outer_slope: OuterSlope) -> None:
        """(p, σ) ← (∂step/∂(w, state))ᵀ (p, σ) + H_b (∂step/∂gradient)ᵀ (p, σ) + ∇ℓ^out; without curvature H_b = 0."""
        live = len(means)
        outputs, pullback = self._outputs_at(iterate, batch)
        gradient = self._gradient(self._kernel.task.values(outputs, batch.y, batch.counts)[1], means, pullback)
        params = flatten(iterate.parameters)[:, : self._trained]
        lr, anchor = self._constants(live)
        inputs = [v.detach().requires_grad_() for v in (params, gradient, anchor, *iterate.state)]
        with torch.enable_grad():
            after, state = self._optimizer.step(inputs[0], inputs[1], tuple(inputs[3:]), lr, inputs[2])
        arriving = (self._adjoint[:live, : self._trained], *(s[:live] for s in self._state_adjoint))
        to_params, to_gradient, to_anchor, *to_state = torch.autograd.grad(
            (after, *state), inputs, arriving, materialize_grads=True
        )
        added = torch.zeros_like(self._adjoint[:live])
        if self._curvature:  # with its sign turned, p ← p + H_b p + ∇ℓ^out; what is added to p is wanted
            added[:, : self._trained] = to_gradient
            self._kernel.apply_hvp_(iterate.parameters, views(added, self._shapes), batch, -means, outer_slope)
            added[:, : self._trained] -= to_gradient
        elif outer_slope is not None:
            pullback(outer_slope(outputs), views(added, self._shapes))
        self._adjoint[:live, : self._trained] = to_params + added[:, : self._trained]
        self._anchor_gain[:live] += to_anchor
        for s, part in zip(self._state_adjoint, to_state, strict=True):
            s[:live] = part

    def end_backward(self) -> Tensor:
        anchor = self._anchor[:, : self._trained].detach().requires_grad_()
        with torch.enable_grad():
            pairs = zip(self._optimizer.init(anchor), self._state_adjoint, strict=True)
            dependent = [(state, adjoint) for state, adjoint in pairs if state.requires_grad]
        if dependent:
            states, adjoints = zip(*dependent, strict=True)
            self._anchor_gain += torch.autograd.grad(states, anchor, adjoints)[0]
        self._adjoint[:, : self._trained] += self._anchor_gain
        return self._adjoint

    def _constants(self, live: int) -> tuple[Tensor, Tensor]:
        return self._step_sizes[:live], self._anchor[:live, : self._trained]

    def _gradient(self, slopes: Slopes, means: Tensor, pullback: Pullback) -> Tensor:
        gradient = self._anchor.new_zeros(len(means), self._anchor.shape[1])
        pullback(slopes(means), views(gradient, self._shapes))
        return gradient[:, : self._trained]

    def _outputs_at(self, iterate: Iterate, batch: Batch) -> tuple[Tensor, Pullback]:
        trained = len(self._kernel.layout.shapes)
        params, buffers = iterate.parameters[:trained], iterate.parameters[trained:]
        return self._kernel.local_vjp([*params, *(buffer.clone() for buffer in buffers)], batch)


Stepping = ProximalStepping | StatefulStepping


def _per_slot(values: Tensor, like: Tensor) -> Tensor:
    """[L] shaped so that it multiplies every slot of `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))

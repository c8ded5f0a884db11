"""The gradient of the outer loss in θ, by an adjoint that walks the rounds backwards.

Θ_k^(t) = θ_{t,k}² / Σ_l θ_{t,l}². With λ_t = dL/dw^(t) and the round's direction u = s_t Σ_k α_k m_k
(`aggregation`), the server's step hands λ_{t+1} on to w^(t) and to u (`ServerOptimizer.vjp`), and then

    dL/dα_k = s_t ⟨ū, m_k⟩      q_k = dL/dΔ_k = s_t α_k ū   (+ what later rounds still took from memory)
    dL/ds_t = Σ_k α_k ⟨ū, m_k⟩
    λ_t     = w̄ + Σ_k (∂Δ_k/∂w^(t))ᵀ q_k + Σ_k Σ_τ ∇ℓ^out_b

`first_order` leaves the Jacobians ∂Δ_k/∂w^(t) out, as the paper's code does by detaching the local gradients:
one federated run plus T·K dot products. `exact` asks the clients for them (`Federation.backprop`). In neither
is there a graph over rounds; what is kept is T models and the clients' updates (`tape`). A client that was set
aside in a round (`screening`) is absent from it on the way back too; who is, is taken for a constant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedunfold.aggregation import coefficients
from fedunfold.errors import DivergenceError
from fedunfold.federation import Federation, RoundRequest
from fedunfold.losses import OuterLoss
from fedunfold.rounds import Algorithm, Server, aggregate
from fedunfold.screening import SetAside
from fedunfold.threads import threads_for
from fedunfold.unfolding.tape import Entered, Tape, TapeKind

AdjointKind = Literal["first_order", "exact"]


@dataclass(frozen=True)
class Unfolded:
    """One pass forwards and backwards: L, dL/dθ [T, K], dL/ds [T], w^(T), and who was set aside on the way."""

    loss: float
    gradient: Tensor
    step_gradient: Tensor
    model: Tensor
    set_aside: tuple[SetAside, ...] = ()


@dataclass(frozen=True)
class _Layer:
    """What the walk back needs of a round."""

    request: RoundRequest
    outer_gradient: Tensor | None
    moments: tuple[Tensor, ...]
    present: Tensor
    entered: Entered
    direction: Tensor | None


def weights_of(theta: Tensor) -> Tensor:
    """Θ = θ²/Σθ² along the last axis."""
    squares = theta.square()
    return squares / squares.sum(-1, keepdim=True)


def unfold(
    federation: Federation,
    theta: Tensor,
    algorithm: Algorithm,
    outer: OuterLoss,
    adjoint: AdjointKind,
    *,
    run: str,
    model: Tensor,
    tape: TapeKind = "full",
) -> Unfolded:
    """Run len(theta) rounds from `model`, and differentiate the outer loss with respect to theta."""
    request = algorithm.request(run, 0, model, outer=outer, path_gradient=adjoint == "first_order")
    layers, loss = [], 0.0
    lengths: list[Tensor] = []
    set_aside: list[SetAside] = []
    server = Server.start(model, algorithm)
    with threads_for(len(federation.clients) * len(model)), Tape(tape) as kept:
        for t, row in enumerate(theta):
            asked = replace(request, round=t, model=server.model)
            sifted = algorithm.sift(federation.train(asked), lengths)
            lengths.append(sifted.lengths)
            set_aside += sifted.set_aside
            loss += sifted.report.outer_loss
            if not math.isfinite(loss):
                raise DivergenceError(
                    f"round {t}: the outer loss is not finite; lower the clients' learning rate (now {federation.lr}), "
                    "or learn with float64."
                )
            moments = server.moments
            server, made = aggregate(server, sifted.report, weights_of(row), algorithm)
            entered = kept.keep(made.contributions, made.present)
            layers.append(_Layer(asked, sifted.report.outer_gradient, moments, made.present, entered, made.direction))
        last = federation.outer(replace(request, round=len(theta), model=server.model))
        gradients = _walk_back(federation, theta, algorithm, layers, last.gradient, exact=adjoint == "exact")
    return Unfolded(loss + last.loss, *gradients, server.model, tuple(set_aside))


def _walk_back(
    federation: Federation,
    theta: Tensor,
    algorithm: Algorithm,
    layers: list[_Layer],
    adjoint: Tensor,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """dL/dθ and dL/ds from λ_T; `owed[k]` is what later rounds put on client k's update before it is reached.

    λ does not depend on the products ⟨ū, m_k⟩: they are waited for only in the end, all at once.
    """
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        alpha = coefficients(weights_of(leaf), torch.stack([layer.present for layer in layers]), algorithm.absent)
    step_sizes = [algorithm.step_size(t) for t in range(len(theta))]
    along: list[tuple[int, Tensor, Tensor]] = []
    moments = tuple(torch.zeros_like(moment) for moment in layers[-1].moments)
    owed: dict[int, Tensor] = {}
    for t in reversed(range(len(layers))):
        layer = layers.pop()
        present, direction = layer.present, layer.direction
        if direction is not None:
            adjoint, to_direction, moments = algorithm.server.vjp(
                layer.request.model, direction, layer.moments, adjoint, moments
            )
            entering = layer.entered
            products = entering.along(to_direction)
            along.append((t, entering.clients, products))
            if exact or products.device.type == "cpu":  # where it need not be waited for, nobody is asked any more
                _check_finite(products[None], [t], federation, exact=exact)
            if exact:
                for k, share in zip(entering.clients.tolist(), alpha[t, entering.clients].tolist(), strict=True):
                    part = step_sizes[t] * share * to_direction
                    owed[k] = owed[k] + part if k in owed else part
        there = torch.nonzero(present).flatten().tolist()
        if exact and there:
            arriving = torch.stack([owed.pop(k) for k in there])
            adjoint = adjoint + federation.backprop(layer.request, present, arriving)
        if layer.outer_gradient is not None:
            adjoint = adjoint + layer.outer_gradient
    table = torch.zeros_like(theta)
    if along:
        rows = torch.cat([torch.full_like(clients, t) for t, clients, _ in along])
        values = torch.cat([values for _, _, values in along]).to(theta)
        table[rows, torch.cat([clients for _, clients, _ in along])] = values
    (gradient,) = torch.autograd.grad(alpha, leaf, theta.new_tensor(step_sizes)[:, None] * table)
    _check_finite(gradient, range(len(theta)), federation, exact=exact)
    return gradient, (alpha.detach() * table).sum(1)


def _check_finite(numbers: Tensor, rounds: Sequence[int], federation: Federation, *, exact: bool) -> None:
    """Refuse rounds [R, …] with numbers that are not; the last one is where it began."""
    bad = torch.nonzero(~torch.isfinite(numbers).all(1)).flatten().tolist()
    if bad:
        raise DivergenceError(
            f"round {rounds[bad[-1]]}: the gradient of the weights is not finite; lower the clients' learning rate "
            f"(now {federation.lr}), or {'take the first_order adjoint' if exact else 'learn with float64'}."
        )

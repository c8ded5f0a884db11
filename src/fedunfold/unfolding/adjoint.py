"""The gradient of the outer loss in θ, by an adjoint that walks the rounds backwards.

Θ_k^(t) = θ_{t,k}² / Σ_l θ_{t,l}². With λ_t = dL/dw^(t) and the round's direction u = s_t Σ_k α_k m_k
(`aggregation`), the server's step hands λ_{t+1} on to w^(t) and to u (`ServerOptimizer.vjp`), and then

    dL/dα_k = s_t ⟨ū, m_k⟩      q_k = dL/dΔ_k = s_t α_k ū   (+ what later rounds still took from memory)
    dL/ds_t = Σ_k α_k ⟨ū, m_k⟩
    λ_t     = w̄ + Σ_k (∂Δ_k/∂w^(t))ᵀ q_k + Σ_k Σ_τ ∇ℓ^out_b

`first_order` leaves the Jacobians ∂Δ_k/∂w^(t) out, as the paper's code does by detaching the local gradients:
one federated run plus T·K dot products. `exact` asks the clients for them (`Federation.backprop`). In neither
is there a graph over rounds; what is kept is T models and the clients' updates (`tape`). Several runs, the draws of
one step of a learning, go in step, so that a federation may do the clients' part of all of them at once. A client
that was set aside in a round (`screening`) is absent from it on the way back too; who is, is taken for a constant.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedunfold.aggregation.absent import coefficients
from fedunfold.aggregation.screening import RejectedUpdate
from fedunfold.core.errors import DivergenceError
from fedunfold.core.federation import Federation, TrainRequest, backprop_all, train_all
from fedunfold.core.task import OuterLoss
from fedunfold.core.threading import threads_for
from fedunfold.training.loop import Algorithm, Server, aggregate_together
from fedunfold.unfolding.update_store import Entered, UpdateStorage, UpdateStore

AdjointKind = Literal["first_order", "exact"]


@dataclass(frozen=True)
class UnrolledResult:
    """One pass forwards and backwards: L, dL/dθ [T, K], dL/ds [T], w^(T), and who was set aside on the way."""

    loss: float
    gradient: Tensor
    step_gradient: Tensor
    model: Tensor
    rejected: tuple[RejectedUpdate, ...] = ()


@dataclass(frozen=True)
class _Layer:
    """What the walk back needs of a round."""

    request: TrainRequest
    outer_gradient: Tensor | None
    moments: tuple[Tensor, ...]
    present: Tensor
    entered: Entered
    direction: Tensor | None


def normalize_squares(theta: Tensor) -> Tensor:
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
    tape: UpdateStorage = "full",
) -> UnrolledResult:
    """Run len(theta) rounds from `model`, and differentiate the outer loss with respect to theta."""
    (found,) = unroll_and_grad(federation, theta, algorithm, outer, adjoint, runs=[run], models=[model], tape=tape)
    return found


def unroll_and_grad(
    federation: Federation,
    theta: Tensor,
    algorithm: Algorithm,
    outer: OuterLoss,
    adjoint: AdjointKind,
    *,
    runs: Sequence[str],
    models: Sequence[Tensor],
    tape: UpdateStorage = "full",
) -> list[UnrolledResult]:
    """`unfold` for several runs in step, which a federation that trains them together does faster."""
    ask = partial(algorithm.request, outer=outer, path_gradient=adjoint == "first_order")
    with threads_for(len(federation.clients) * len(models[0])), ExitStack() as opened:
        ways = [
            _ForwardPass(Server.start(model, algorithm), opened.enter_context(UpdateStore(tape))) for model in models
        ]
        for t, row in enumerate(theta):
            requests = [ask(run, t, way.server.model) for run, way in zip(runs, ways, strict=True)]
            _forward_round(ways, federation, requests, normalize_squares(row), algorithm)
        lasts = [federation.outer(ask(run, len(theta), way.server.model)) for run, way in zip(runs, ways, strict=True)]
        ways_back = [
            _BackwardPass(way.layers, last.gradient, theta, algorithm, federation.lr, exact=adjoint == "exact")
            for way, last in zip(ways, lasts, strict=True)
        ]
        for _ in theta:
            _backward_round(ways_back, federation)
        gradients = [way_back.gradients() for way_back in ways_back]
    return [
        UnrolledResult(way.loss + last.loss, *found, way.server.model, tuple(way.rejected))
        for way, last, found in zip(ways, lasts, gradients, strict=True)
    ]


@dataclass
class _ForwardPass:
    """A run on its way forwards: where the server stands, and what has been met."""

    server: Server
    tape: UpdateStore
    layers: list[_Layer] = field(default_factory=list)
    loss: float = 0.0
    lengths: list[Tensor] = field(default_factory=list)
    rejected: list[RejectedUpdate] = field(default_factory=list)


def _forward_round(
    ways: Sequence[_ForwardPass],
    federation: Federation,
    requests: Sequence[TrainRequest],
    weights: Tensor,
    algorithm: Algorithm,
) -> None:
    """One round of every run."""
    reports = []
    for way, trained in zip(ways, train_all(federation, requests), strict=True):
        sifted = algorithm.filter_updates(trained, way.lengths)
        reports.append(sifted.report)
        way.lengths.append(sifted.lengths)
        way.rejected += sifted.rejected
        way.loss += sifted.report.outer_loss
        if not math.isfinite(way.loss):
            raise DivergenceError(
                f"round {trained.round}: the outer loss is not finite; lower the clients' learning rate (now "
                f"{federation.lr}), or learn with float64."
            )
    made = aggregate_together([way.server for way in ways], reports, [weights] * len(ways), algorithm)
    for way, request, report, (server, put_together) in zip(ways, requests, reports, made, strict=True):
        entered = way.tape.keep(put_together.contributions, put_together.present)
        moments, direction = way.server.moments, put_together.direction
        way.layers.append(_Layer(request, report.outer_gradient, moments, put_together.present, entered, direction))
        way.server = server


class _BackwardPass:
    """A run on its way back: λ from λ_T on, what later rounds put on a client's update before it is reached (`owed`),
    and the products ⟨ū, m_k⟩ met, which λ does not depend on: they are waited for only in the end, all at once.
    """

    def __init__(
        self, layers: list[_Layer], adjoint: Tensor, theta: Tensor, algorithm: Algorithm, lr: float, *, exact: bool
    ) -> None:
        self.exact = exact
        self._layers, self._adjoint, self._algorithm, self._lr = layers, adjoint, algorithm, lr
        with torch.enable_grad():
            self._theta = theta.detach().requires_grad_()
            present = torch.stack([layer.present for layer in layers])
            self._alpha = coefficients(normalize_squares(self._theta), present, algorithm.absent)
        self._step_sizes = [algorithm.step_size(t) for t in range(len(theta))]
        self._moments = tuple(torch.zeros_like(moment) for moment in layers[-1].moments)
        self._owed: dict[int, Tensor] = {}
        self._along: list[tuple[int, Tensor, Tensor]] = []

    def backward_server(self) -> _Layer:
        """From λ_{t+1} to w̄ and, where it is asked for, to q_k; gives the round that has been reached."""
        layer = self._layers.pop()
        if layer.direction is None:
            return layer
        t, entered = len(self._layers), layer.entered
        self._adjoint, to_direction, self._moments = self._algorithm.server.vjp(
            layer.request.model, layer.direction, layer.moments, self._adjoint, self._moments
        )
        products = entered.along(to_direction)
        self._along.append((t, entered.clients, products))
        if self.exact or products.device.type == "cpu":  # where it need not be waited for, nobody is asked any more
            _check_finite(products[None], [t], self._lr, exact=self.exact)
        if self.exact:
            for k, share in zip(entered.clients.tolist(), self._alpha[t, entered.clients].tolist(), strict=True):
                part = self._step_sizes[t] * share * to_direction
                self._owed[k] = self._owed[k] + part if k in self._owed else part
        return layer

    def pay(self, layer: _Layer) -> Tensor:
        """q_k [P, d] of the clients that are there, to whom nothing is owed then."""
        return torch.stack([self._owed.pop(k) for k in torch.nonzero(layer.present).flatten().tolist()])

    def add(self, part: Tensor) -> None:
        """To λ_t."""
        self._adjoint = self._adjoint + part

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dL/dθ and dL/ds, when all rounds have been walked back."""
        table = torch.zeros_like(self._theta)
        if self._along:
            rows = torch.cat([torch.full_like(clients, t) for t, clients, _ in self._along])
            values = torch.cat([values for _, _, values in self._along]).to(table)
            table[rows, torch.cat([clients for _, clients, _ in self._along])] = values
        stretched = table.new_tensor(self._step_sizes)[:, None] * table
        (gradient,) = torch.autograd.grad(self._alpha, self._theta, stretched)
        _check_finite(gradient, range(len(gradient)), self._lr, exact=self.exact)
        return gradient, (self._alpha.detach() * table).sum(1)


def _backward_round(ways: Sequence[_BackwardPass], federation: Federation) -> None:
    """One round of every run, backwards: the clients of all of them are asked at once."""
    layers = [way.backward_server() for way in ways]
    asked = [(way, layer) for way, layer in zip(ways, layers, strict=True) if way.exact and layer.present.any()]
    if asked:
        added = backprop_all(
            federation,
            [layer.request for _, layer in asked],
            [layer.present for _, layer in asked],
            [way.pay(layer) for way, layer in asked],
        )
        for (way, _), part in zip(asked, added, strict=True):
            way.add(part)
    for way, layer in zip(ways, layers, strict=True):
        if layer.outer_gradient is not None:
            way.add(layer.outer_gradient)


def _check_finite(numbers: Tensor, rounds: Sequence[int], lr: float, *, exact: bool) -> None:
    """Refuse rounds [R, …] with numbers that are not; the last one is where it began."""
    bad = torch.nonzero(~torch.isfinite(numbers).all(1)).flatten().tolist()
    if bad:
        raise DivergenceError(
            f"round {rounds[bad[-1]]}: the gradient of the weights is not finite; lower the clients' learning rate "
            f"(now {lr}), or {'take the first_order adjoint' if exact else 'learn with float64'}."
        )

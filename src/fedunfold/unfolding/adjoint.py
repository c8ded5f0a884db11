"""The gradient of the outer loss in what was decided, by an adjoint: a backward pass without a graph over the rounds.

A round's direction is u_t = s_t Σ_k α_k m_k + β_t u_{t−1} (`aggregation.absent`), with weights, step and momentum of a
table, Θ_k^(t) = θ_{t,k}² / Σ_l θ_{t,l}², or of a rule. With λ_t = dL/dw^(t) and ū_t = dL/du_t, the server's step passes
λ_{t+1}, times the model's scale, to w^(t), u_t and its trust (`trusted_vjp`); u_t also gets β_{t+1} ū_{t+1}. Then

    dL/dα_k = s_t ⟨ū, m_k⟩      q_k = dL/dΔ_k = s_t α_k ū   (+ what later rounds took from memory)
    dL/ds_t = Σ_k α_k ⟨ū, m_k⟩  dL/dβ_t = ⟨ū, u_{t−1}⟩
    λ_t     = w̄ + Σ_k (∂Δ_k/∂w^(t))ᵀ q_k + Σ_k Σ_τ ∇ℓ^out_b

`FirstOrder` leaves the Jacobians ∂Δ_k/∂w^(t) out, as the paper's code does by detaching the local gradients: one
federated run plus T·K inner products. `Exact` has the clients compute them (`Federation.vjp`), which first order needs
too, without curvature, where a local step depends on w itself, as with weight decay. What is stored is T models and the
clients' updates (`update_store`), for `Exact` also control variates. Several runs, the samples of one outer step, are
carried out together. Who is sampled or rejected, what a rule read, the scale and control variates are constants.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedunfold.aggregation.absent import coefficients
from fedunfold.aggregation.screening import filter_updates
from fedunfold.aggregation.server_round import ServerState, aggregate, with_past
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.federation import Federation
from fedunfold.core.messages import Metric, TrainRequest
from fedunfold.core.outcomes import RejectedUpdate
from fedunfold.core.parts import OuterLoss, RoundDecision, RoundInfo, State
from fedunfold.core.threading import threads_for
from fedunfold.rules.rule import Weigh
from fedunfold.unfolding.state import normalize_squares
from fedunfold.unfolding.update_store import StoredUpdates, UpdateStorage, UpdateStore

AdjointKind = Literal["first_order", "exact"]


@dataclass(frozen=True)
class UnrolledResult:
    """One run forward and backward.

    Attributes:
        loss: L.
        gradient: dL/dΘ, [T, K], or dL/dθ of a table.
        step_gradient: dL/ds, [T].
        momentum_gradient: dL/dβ, [T].
        trust_gradient: dL/da, [T].
        model: w^(T), [d].
        rejected: Whose updates were rejected.
    """

    loss: float
    gradient: Tensor
    step_gradient: Tensor
    momentum_gradient: Tensor
    trust_gradient: Tensor
    model: Tensor
    rejected: tuple[RejectedUpdate, ...] = ()


def unroll_and_grad(
    federation: Federation,
    theta: Tensor,
    algorithm: Algorithm,
    outer: OuterLoss,
    adjoint: AdjointKind,
    *,
    runs: Sequence[str],
    models: Sequence[Tensor],
    storage: UpdateStorage = "full",
) -> list[UnrolledResult]:
    """Run T rounds with a table of weights and differentiate the outer loss with respect to θ.

    Args:
        federation: Who trains.
        theta: θ, [T, K].
        algorithm: How clients and server train.
        outer: The outer loss.
        adjoint: Whether local training is differentiated exactly or to first order.
        runs: Names of the runs that are carried out together.
        models: w^(0) of each.
        storage: Where the updates of all rounds are stored.

    Returns:
        A result for every run.
    """
    with torch.enable_grad():
        roots = theta.detach().requires_grad_()
        weights = normalize_squares(roots)
    rows = weights.detach()
    found = unroll_decisions(
        *(federation, lambda report, state: (rows[report.round], state), len(rows), algorithm, outer, adjoint),
        runs=runs,
        models=models,
        storage=storage,
    )
    back = partial(torch.autograd.grad, weights, roots, retain_graph=True)
    return [replace(result, gradient=back(result.gradient.to(weights))[0]) for result in found]


def unroll_decisions(
    federation: Federation,
    decide: Weigh,
    rounds: int,
    algorithm: Algorithm,
    outer: OuterLoss,
    adjoint: AdjointKind,
    *,
    runs: Sequence[str],
    models: Sequence[Tensor],
    required_metrics: frozenset[Metric] = frozenset(),
    storage: UpdateStorage = "full",
) -> list[UnrolledResult]:
    """Run T rounds and differentiate the outer loss with respect to what is decided in them.

    Args:
        federation: Who trains.
        decide: Weights, or a `RoundDecision`, from what clients sent in a round and a state of its own.
        rounds: T.
        algorithm: How clients and server train.
        outer: The outer loss.
        adjoint: Whether local training is differentiated exactly or to first order.
        runs: Names of the runs that are carried out together.
        models: w^(0) of each.
        required_metrics: What clients have to report to decide.
        storage: Where the updates of all rounds are stored.

    Returns:
        A result for every run, with dL/dΘ, dL/ds (s with the algorithm's own step size in it), dL/dβ and dL/da.
    """
    exact = adjoint == "exact"
    through_steps = exact or not algorithm.local.uses_gradients_only
    request = partial(
        algorithm.request,
        outer=outer,
        path_gradient=not through_steps,
        curvature=exact,
        required_metrics=required_metrics,
    )
    with threads_for(len(federation.clients) * len(models[0])), ExitStack() as opened:
        forward = [
            _ForwardPass(ServerState.start(model, algorithm), opened.enter_context(UpdateStore(storage)))
            for model in models
        ]
        named = list(zip(runs, forward, strict=True))
        for t in range(rounds):
            requests = [request(run, t, now.server.model, **now.server.carried) for run, now in named]
            _forward_round(forward, federation, requests, decide, algorithm)
        final = federation.outer_loss([request(run, rounds, now.server.model) for run, now in named])
        backward = [
            (Exact if through_steps else FirstOrder)(done.layers, last.gradient, algorithm, federation.lr)
            for done, last in zip(forward, final, strict=True)
        ]
        for _ in range(rounds):
            _backward_round(backward, federation)
        gradients = [done.gradients() for done in backward]
    return [
        UnrolledResult(done.loss + last.loss, *found, done.server.model, tuple(done.rejected))
        for done, last, found in zip(forward, final, gradients, strict=True)
    ]


@dataclass(frozen=True)
class _Layer:
    """What the backward pass needs of a round."""

    request: TrainRequest
    decision: RoundDecision
    outer_gradient: Tensor | None
    optimizer: State
    previous: Tensor | None
    participated: Tensor
    eligible: Tensor
    direction: Tensor | None
    info: RoundInfo
    updates: StoredUpdates


@dataclass
class _ForwardPass:
    """A run on its way forward: where the server stands, and what was met."""

    server: ServerState
    store: UpdateStore
    memory: Any = None
    layers: list[_Layer] = field(default_factory=list)
    loss: float = 0.0
    log_norms: list[Tensor] = field(default_factory=list)
    rejected: list[RejectedUpdate] = field(default_factory=list)


def _forward_round(
    passes: Sequence[_ForwardPass],
    federation: Federation,
    requests: Sequence[TrainRequest],
    decide: Weigh,
    algorithm: Algorithm,
) -> None:
    """One round of every run."""
    outer, t = requests[0].outer, requests[0].round
    met = federation.outer_loss(requests) if outer is not None and outer.every_round and t else None
    reports, decisions = [], []
    for now, trained in zip(passes, federation.train(requests), strict=True):
        found = filter_updates(trained, algorithm.filter, now.log_norms, normalized=algorithm.local.normalized)
        report = with_past(found.report, algorithm.absent, now.server)
        reports.append(report)
        now.log_norms.append(found.log_norms)
        now.rejected += found.rejected
        now.loss += found.report.outer.loss
        decided, now.memory = decide(report, now.memory)
        decisions.append(decided if isinstance(decided, RoundDecision) else RoundDecision(decided))
    if met is not None:
        for now, result in zip(passes, met, strict=True):
            now.loss += result.loss
    if not all(math.isfinite(now.loss) for now in passes):
        raise DivergenceError(
            f"round {t}: the outer loss is not finite; lower the clients' learning rate (now {federation.lr}), or "
            "learn with float64."
        )
    done = aggregate([now.server for now in passes], reports, decisions, algorithm, federation.lr)
    for i, (now, report, (server, aggregated)) in enumerate(zip(passes, reports, done, strict=True)):
        gradient = report.outer.gradient if met is None else met[i].gradient
        updates = now.store.add(aggregated.entered, aggregated.participated)
        # Of what was aggregated all but the updates themselves: these are in the store alone.
        about = aggregated.participated, aggregated.eligible, aggregated.direction, aggregated.info
        before = now.server.optimizer, now.server.direction
        sent = requests[i] if requests[i].curvature else replace(requests[i], control=None)
        parts = (sent, decisions[i], gradient, *before, *about, updates)
        now.layers.append(_Layer(*parts))
        now.server = server


class FirstOrder:
    """A run on its way backward, local training counting as a constant shift: λ from λ_T on, and the products ⟨ū, m_k⟩
    met, which λ does not depend on: a GPU is waited for only in the end."""

    def __init__(self, layers: list[_Layer], adjoint: Tensor, algorithm: Algorithm, lr: float) -> None:
        self._layers, self._adjoint, self._algorithm, self._lr = layers, adjoint, algorithm, lr
        with torch.enable_grad():
            self._weights = torch.stack([layer.decision.weights for layer in layers]).detach().requires_grad_()
            eligible = torch.stack([layer.eligible for layer in layers])
            self._alpha = coefficients(self._weights, eligible)
        self._steps = [algorithm.step_size(t) * layer.decision.step for t, layer in enumerate(layers)]
        self._optimizer: State = tuple(torch.zeros_like(moment) for moment in layers[-1].optimizer)
        self._carried: Tensor | None = None  # β_{t+1} ū_{t+1}
        self._products: list[tuple[int, Tensor, Tensor]] = []
        self._momenta = torch.zeros(len(layers), dtype=torch.float64)
        self._trusts = [layers[-1].request.model.new_zeros(()) for _ in layers]

    def backward_server(self) -> _Layer:
        """From λ_{t+1} to w̄ through the server's update; returns the round that was reached."""
        layer = self._layers.pop()
        if layer.direction is None:
            return layer
        t, momentum, scale = len(self._layers), layer.decision.momentum, layer.decision.scale
        to_next = self._adjoint if scale == 1 else scale * self._adjoint
        at, adjoint = (layer.request.model, layer.direction, layer.optimizer), (to_next, self._optimizer)
        self._adjoint, to_direction, self._optimizer, self._trusts[t] = self._algorithm.server.trusted_vjp(
            at, adjoint, layer.info, layer.decision.trust
        )
        if self._carried is not None:
            to_direction = to_direction + self._carried
        self._carried = momentum * to_direction if momentum else None
        if layer.previous is not None:
            self._momenta[t] = to_direction @ layer.previous
        products = layer.updates.inner_products(to_direction)
        self._products.append((t, layer.updates.clients, products))
        self._pass_on(layer, t, to_direction, products)
        return layer

    def _pass_on(self, layer: _Layer, t: int, to_direction: Tensor, products: Tensor) -> None:
        """What ū means for the clients; where no GPU has to be waited for, ⟨ū, m_k⟩ is checked at once."""
        if products.device.type == "cpu":
            _check_finite(products[None], [t], self._lr, remedy="learn with float64")

    def pop_adjoints(self, layer: _Layer) -> Tensor | None:
        """q_k [P, d] of the clients that participated in a round, where they have to compute with them."""
        return None

    def add(self, part: Tensor) -> None:
        """To λ_t."""
        self._adjoint = self._adjoint + part

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dL/dΘ, dL/ds, dL/dβ and dL/da, when all rounds have been reached."""
        table = torch.zeros_like(self._weights)
        if self._products:
            rows = torch.cat([torch.full_like(clients, t) for t, clients, _ in self._products])
            values = torch.cat([values for _, _, values in self._products]).to(table)
            table[rows, torch.cat([clients for _, clients, _ in self._products])] = values
        scaled = table.new_tensor(self._steps)[:, None] * table
        (gradient,) = torch.autograd.grad(self._alpha, self._weights, scaled)
        _check_finite(gradient, range(len(gradient)), self._lr, remedy="learn with float64")
        return gradient, (self._alpha.detach() * table).sum(1), self._momenta, torch.stack(self._trusts).cpu()


class Exact(FirstOrder):
    """The same with local training differentiated by the clients, without the curvature of their losses where first
    order is requested of an optimiser whose steps use more than gradients. What later rounds put on a client's update
    before its round is reached waits in `_pending`."""

    def __init__(self, layers: list[_Layer], adjoint: Tensor, algorithm: Algorithm, lr: float) -> None:
        super().__init__(layers, adjoint, algorithm, lr)
        self._pending: dict[int, Tensor] = {}

    def _pass_on(self, layer: _Layer, t: int, to_direction: Tensor, products: Tensor) -> None:
        _check_finite(products[None], [t], self._lr, remedy="take the first_order adjoint")
        clients = layer.updates.clients
        for k, share in zip(clients.tolist(), self._alpha[t, clients].tolist(), strict=True):
            part = self._steps[t] * share * to_direction
            self._pending[k] = self._pending[k] + part if k in self._pending else part

    def pop_adjoints(self, layer: _Layer) -> Tensor | None:
        clients = torch.nonzero(layer.participated).flatten().tolist()
        return torch.stack([self._pending.pop(k) for k in clients]) if clients else None


def _backward_round(passes: Sequence[FirstOrder], federation: Federation) -> None:
    """One round of every run, backward: the clients of all of them compute at once."""
    layers = [now.backward_server() for now in passes]
    popped = [(now, layer, now.pop_adjoints(layer)) for now, layer in zip(passes, layers, strict=True)]
    pending = [(now, layer, rows) for now, layer, rows in popped if rows is not None]
    if pending:
        added = federation.vjp(
            [layer.request for _, layer, _ in pending],
            [layer.participated for _, layer, _ in pending],
            [rows for _, _, rows in pending],
        )
        for (now, _, _), part in zip(pending, added, strict=True):
            now.add(part)
    for now, layer in zip(passes, layers, strict=True):
        if layer.outer_gradient is not None:
            now.add(layer.outer_gradient)


def _check_finite(values: Tensor, rounds: Sequence[int], lr: float, *, remedy: str) -> None:
    """Refuse rounds [R, …] with values that are not; the last one is where it began."""
    bad = torch.nonzero(~torch.isfinite(values).all(1)).flatten().tolist()
    if bad:
        raise DivergenceError(
            f"round {rounds[bad[-1]]}: the gradient of the weights is not finite; lower the clients' learning rate "
            f"(now {lr}), or {remedy}."
        )

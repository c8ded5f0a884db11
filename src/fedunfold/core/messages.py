"""What passes between the server's side of a round and the engine that carries it out.

A round is one `TrainRequest` and the `ClientUpdates` that come back. Models are flat vectors in R^d; K clients
take part in a federation, C of them are sampled for a round (the cohort), P of those participate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedunfold.core.control import Control
from fedunfold.core.errors import InputError
from fedunfold.core.own_layers import OwnEntries
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import Participation
from fedunfold.core.parts import LocalOptimizer, OuterLoss, Selection
from fedunfold.core.server_data import ServerData

Metric = Literal["loss", "start_loss", "accuracy", "norm", "gradients"]
AbsentLoss = Literal["evaluate", "skip"]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client before the first round.

    Attributes:
        client_id: Its name in the federation.
        num_examples: N_k.
        label_counts: How many of them each class has.
    """

    client_id: str
    num_examples: int
    label_counts: tuple[int, ...]


@dataclass(frozen=True)
class Broadcast:
    """What a client that trains alone cannot work out, because it depends on the other clients.

    Attributes:
        step_scale: c_k inside the loop of local steps.
        update_scale: The factor on w_k − w^(t) after it.
        class_weights: N/(C n_y) of the outer loss, [C], where it balances classes.
        extras: Vectors that the local optimiser needs from the server, by name.
    """

    step_scale: float = 1.0
    update_scale: float = 1.0
    class_weights: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainRequest:
    """What the server requests of the federation in one round.

    Attributes:
        run: Names the randomness of a run, such as ``trial-0``.
        round: t, from 0.
        model: w^(t), [d].
        optimizer: The clients' local optimiser.
        required_metrics: What clients have to report beside their updates.
        outer: The outer loss to be evaluated along local training, where one is wanted.
        path_gradient: Whether its gradient is wanted too: for the first-order adjoint, not for the exact one.
        absent_loss: Whether absent clients report a loss at w^(t) (`evaluate`, in a simulation) or nothing (`skip`).
        stores_updates: Whether the server stores single updates beyond the round.
        compares_updates: Whether it compares updates with each other; not every federation reveals them.
        broadcast: What depends on the other clients, where a client trains alone.
        curvature: Whether the backward pass counts the curvature of the training loss; to first order it does not.
        reported: What clients last reported of the metrics that the client sampler requires, [K] each.
        own: The clients' own layers, where some stay with them (`core.own_layers`).
        control: Control variates, where the local optimiser has some (`core.control`).
        participation: Who takes part, where the server has settled it; else it is drawn.
    """

    run: str
    round: int
    model: Tensor
    optimizer: LocalOptimizer
    required_metrics: frozenset[Metric] = frozenset()
    outer: OuterLoss | None = None
    path_gradient: bool = False
    absent_loss: AbsentLoss = "evaluate"
    stores_updates: bool = False
    compares_updates: bool = False
    broadcast: Broadcast | None = None
    curvature: bool = True
    reported: Mapping[Metric, Tensor] = field(default_factory=dict)
    own: OwnEntries | None = None
    control: Control | None = None
    participation: Participation | None = None

    @property
    def outer_along_path(self) -> OuterLoss | None:
        """The outer loss, where the local steps of this round are part of it."""
        return None if self.outer is None or self.outer.only_final else self.outer

    @property
    def evaluates_absent(self) -> bool:
        """Whether absent clients of the cohort report a loss at w^(t)."""
        return self.absent_loss == "evaluate" and ("loss" in self.required_metrics or self.outer_along_path is not None)


class WeightedSum(Protocol):
    """Σ_k c_k Δ_k, and what can be known of the updates in it."""

    @property
    def total(self) -> Tensor:
        """Σ_k c_k (w_k − w^(t)), [d], over the clients that entered it."""

    @property
    def clients(self) -> Tensor:
        """Their indices [n]; some that participated may have been lost while a secure sum was computed."""

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, w_k − w^(t)⟩ of each of them, [n]."""


class UpdateSet(Protocol):
    """A round's updates Δ_k = w_k − w^(t): open ones are at the server, secure ones stay with the clients."""

    @property
    def clients(self) -> Tensor:
        """Indices of the clients they come from, [n]."""

    @property
    def rows(self) -> Tensor:
        """Δ_k, [n, d]; refused where updates are secure."""

    def weighted_sum(self, coefficients: Tensor) -> WeightedSum:
        """Their sum with coefficients c [K]."""

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩, [n]."""


@dataclass(frozen=True)
class OpenUpdates:
    """Updates that the server sees one by one.

    Attributes:
        clients: Indices of the clients they come from, [n].
        rows: Δ_k, [n, d].
        norms: ‖Δ_k‖ [n] without buffers, where an engine has computed them already.
    """

    clients: Tensor
    rows: Tensor
    norms: Tensor | None = None

    def weighted_sum(self, coefficients: Tensor) -> "OpenSum":
        """Their sum with coefficients c [K]."""
        chosen = coefficients[self.clients].to(self.rows.device, self.rows.dtype, non_blocking=self.rows.is_cuda)
        return OpenSum(chosen @ self.rows, self.clients, self)

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩, [n]."""
        return self.rows @ vector

    def copies(self) -> list[Tensor]:
        """Δ_k [d], each in memory of its own: a view of a row would keep all rows alive."""
        return [row.clone() for row in self.rows]

    def select(self, accepted: Tensor) -> "OpenUpdates":
        """Those of some of the clients [n]."""
        rows = self.rows[accepted.to(self.rows.device)]
        return OpenUpdates(self.clients[accepted], rows, None if self.norms is None else self.norms[accepted])


@dataclass(frozen=True)
class OpenSum:
    """A weighted sum of open updates, which are still at hand."""

    total: Tensor
    clients: Tensor
    updates: UpdateSet

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩, [n]."""
        return self.updates.inner_products(vector)


@dataclass(frozen=True)
class ClientMetrics:
    """What clients reported beside their updates; None where it was not requested.

    Attributes:
        loss: F_k, the sum of the minibatch losses met, [K]; NaN where a client reported nothing.
        start_loss: Mean loss on all of client k's data at w^(t), [K].
        accuracy: That of w_k on client k's own training data, a fraction, [K].
        norm: ‖Δ_k‖ without buffers, [K].
        gradients: Sums of local gradients of the participating clients, [P, d].
        own: What they came to in layers that stay with them, [P, n]: kept for them, and shown to no rule.
        controls: Their control variates s_k after the round, [P, d]; None where there are none or clients keep theirs.
    """

    loss: Tensor | None = None
    start_loss: Tensor | None = None
    accuracy: Tensor | None = None
    norm: Tensor | None = None
    gradients: Tensor | None = None
    own: Tensor | None = None
    controls: Tensor | None = None


@dataclass(frozen=True)
class OuterTerms:
    """What a round adds to the outer loss and to λ_t.

    Attributes:
        loss: Σ of the outer losses met in the round.
        gradient: Σ_k Σ_τ ∇ℓ^out_b of absent clients, and of participating ones for `path_gradient`, [d].
        client_losses: Where updates are compared, and may be rejected, each client's part, [P]; not in `loss` yet.
        client_gradients: The same for `gradient`, [P, d].
    """

    loss: float = 0.0
    gradient: Tensor | None = None
    client_losses: Tensor | None = None
    client_gradients: Tensor | None = None

    def summed(self, accepted: Tensor) -> "OuterTerms":
        """With the parts of the accepted clients [P] added up."""
        loss, gradient = self.loss, self.gradient
        if self.client_losses is not None:
            loss += float(self.client_losses[accepted].sum())
        if self.client_gradients is not None:
            own = self.client_gradients[accepted.to(self.client_gradients.device)].sum(0)
            gradient = own if gradient is None else gradient + own
        return OuterTerms(loss, gradient)


@dataclass(frozen=True)
class ClientUpdates:
    """What comes back from a round.

    Attributes:
        round: t, from 0.
        client_ids: Names of all K clients; the other per-client tensors have their order.
        num_examples: N_k, [K].
        participated: Who trained and sent an update, [K].
        num_steps: τ_k, [K]; 0 where unknown or absent.
        updates: Δ_k = w_k − w^(t) of the P clients that participated.
        remembered: m_k of all clients that enter the round, where the server remembers updates of earlier rounds.
        previous: Σ_k α_k m_k of the last round that any update entered, [d]; None before the first.
        cohort: Who was sampled for the round, [K]; by default everybody. Only one of the cohort can be absent.
        selection: How the cohort was sampled; None where it was not by one of the client samplers.
        metrics: What the clients reported beside their updates.
        outer: What the round adds to the outer loss.
        layout: What the entries of a model are.
        rejected: Clients whose contribution cannot be used, and why; they count as absent.
        label_counts: How many samples of each class client k has, [K, C]; None or C = 0 where it is not known.
        lr: η, the clients' learning rate; None where it is not known.
        model: w^(t), [d]; None where it is not known.
        server_data: Rows that the server holds itself; None where it holds none.
        staleness: How many steps the server has made since each client began to train, [K]; None in synchronous rounds,
            where it is 0.

    >>> import fedunfold as fu
    >>> equal = lambda updates, state: (updates.participated.double() / updates.participated.sum(), state)
    >>> fu.run("digits-label-skew", equal).weights[0].tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """

    round: int
    client_ids: tuple[str, ...]
    num_examples: Tensor
    participated: Tensor
    num_steps: Tensor
    updates: UpdateSet = field(default_factory=lambda: OpenUpdates(torch.zeros(0, dtype=torch.long), torch.zeros(0, 0)))
    remembered: UpdateSet | None = None
    previous: Tensor | None = None
    cohort: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    selection: Selection | None = None
    metrics: ClientMetrics = ClientMetrics()
    outer: OuterTerms = OuterTerms()
    layout: ParamLayout = field(default_factory=ParamLayout)
    rejected: Mapping[str, str] = field(default_factory=dict)
    label_counts: Tensor | None = None
    lr: float | None = None
    model: Tensor | None = None
    server_data: ServerData | None = None
    staleness: Tensor | None = None

    def __post_init__(self) -> None:
        if not len(self.cohort):
            object.__setattr__(self, "cohort", torch.ones_like(self.participated, dtype=torch.bool))

    @property
    def entering(self) -> UpdateSet:
        """What enters the round's direction: the updates, and remembered ones of absent clients."""
        return self.remembered or self.updates

    def metric(self, name: Metric) -> Tensor:
        """What clients reported under this name, on the device it came on."""
        value: Tensor | None = getattr(self.metrics, name)
        if value is None:
            raise InputError(f"round {self.round} was reported without '{name}'; name it in the required metrics.")
        return value

    def accept(self, accepted: Tensor) -> "ClientUpdates":
        """The same round, where of the clients that participated only some [P] are accepted; the others are absent."""
        outer = self.outer.summed(accepted)
        if bool(accepted.all()):
            return replace(self, outer=outer)
        participated = self.participated.clone()
        participated[self.participated] = accepted
        left_out = self.participated & ~participated

        def without(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(left_out.to(values.device), torch.nan, values)

        reported = {name: without(getattr(self.metrics, name)) for name in ("loss", "start_loss", "accuracy", "norm")}
        of_clients = {name: getattr(self.metrics, name) for name in ("gradients", "own", "controls")}
        reported |= {k: None if rows is None else rows[accepted.to(rows.device)] for k, rows in of_clients.items()}
        updates = self.updates.select(accepted) if isinstance(self.updates, OpenUpdates) else self.updates
        steps, metrics = torch.where(participated, self.num_steps, 0), ClientMetrics(**reported)
        return replace(self, participated=participated, num_steps=steps, updates=updates, metrics=metrics, outer=outer)

"""The contract between everything above a round and the engine below it.

An engine (the simulation in one process, or real clients over a network) offers four verbs; rules, server
optimisers, unfolding and experiments are written once against them. Models are flat vectors in R^d.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedunfold.core.task import OuterLoss
from fedunfold.local.optimizers import LocalOptimizer

Need = Literal["loss", "start_loss", "accuracy", "gradients"]
AbsentLoss = Literal["evaluate", "skip"]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client before the first round."""

    key: str
    samples: int
    label_counts: tuple[int, ...]


@dataclass(frozen=True)
class TrainRequest:
    """What the server asks of the federation in one round.

    `outer` asks for the outer loss along the way, with its gradient where `path_gradient` is set (the
    first-order adjoint needs it; the exact one gathers it on the way back). `absent_loss` says whether
    clients that are away still report a loss at w^(t) (`evaluate`, possible in a simulation) or nothing.
    `keeps_updates` says that the server keeps single updates beyond the round, `compares_updates` that it holds them
    against each other; not every federation shows them.

    A client that is asked alone cannot work out what depends on the others: `scales`, its (c_k, factor after
    the loop) of the update, and `class_weights` [C] of the outer loss come with the request then.
    """

    run: str
    round: int
    model: Tensor
    update: LocalOptimizer
    needs: frozenset[Need] = frozenset()
    outer: OuterLoss | None = None
    path_gradient: bool = False
    absent_loss: AbsentLoss = "evaluate"
    keeps_updates: bool = False
    compares_updates: bool = False
    scales: tuple[float, float] | None = None
    class_weights: Tensor | None = None


class HiddenSum(Protocol):
    """A weighted sum of updates that nobody has seen one by one."""

    @property
    def total(self) -> Tensor:
        """Σ_k c_k (w_k − w^(t)), [d], over the clients that entered it."""
        ...

    @property
    def clients(self) -> Tensor:
        """Indices of these: some that were present may have been lost while the sum was made."""
        ...

    def along(self, vector: Tensor) -> Tensor:
        """⟨v, w_k − w^(t)⟩ of each of them."""
        ...


class SecureUpdates(Protocol):
    """A round's updates where they stay with the clients."""

    def weighted_sum(self, coefficients: Tensor) -> HiddenSum:
        """Their sum with coefficients c [K]."""
        ...


@dataclass(frozen=True)
class ClientUpdates:
    """What comes back. K clients, P of them present, in the order of `keys`.

    `updates[P, d]` are w_k − w^(t); they are [0, d] where they stay `hidden` and only sums of them can be had. `loss`
    is F_k summed over the minibatches met, `start_loss` the mean loss on all of client k's data at w^(t), `accuracy`
    that of w_k on its own training data (a fraction); NaN where a client reported nothing. `gradients[P, d]` are the
    sums of local gradients. Only what the request named is filled. `outer_gradient[d]` is the sum over clients of
    Σ_τ ∇ℓ^out_b that belongs directly to λ_t: absent clients' always, present clients' where `path_gradient` was asked
    for. Where updates are compared, the parts of present clients are not in `outer_loss` and `outer_gradient` yet, but
    one by one in `per_client_outer_loss[P]` and `per_client_outer_gradients[P, d]`: some may still be set aside.

    `norms[P]` are the lengths ‖Δ_k‖ of the updates where these have been measured on the way: who changes an update
    takes them out.

    `refused` are clients that were there with something that cannot be used, and why; they count as absent.

    The last `statistics` numbers of a model are running statistics of its layers: they are averaged with Θ as they
    are, and have no gradient.

    >>> import fedunfold as fu
    >>> @fu.rule()
    ... def equal_among_present(report, state):
    ...     return report.present.double() / report.present.sum(), state
    >>> fu.run("digits-label-skew", equal_among_present).weights[0].tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """

    round: int
    keys: tuple[str, ...]
    sizes: Tensor
    present: Tensor
    steps: Tensor
    updates: Tensor
    loss: Tensor | None = None
    start_loss: Tensor | None = None
    accuracy: Tensor | None = None
    gradients: Tensor | None = None
    outer_loss: float = 0.0
    outer_gradient: Tensor | None = None
    per_client_outer_loss: Tensor | None = None
    per_client_outer_gradients: Tensor | None = None
    hidden: SecureUpdates | None = None
    norms: Tensor | None = None
    statistics: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OuterLossResult:
    """The outer loss of the last layer, t = T, and its gradient in w^(T)."""

    loss: float
    gradient: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Test result of one model: accuracies are fractions, the loss is the mean cross-entropy."""

    accuracy: float
    loss: float
    class_accuracy: Tensor = field(default_factory=lambda: torch.empty(0))


class Federation(Protocol):
    """One round forwards, the same round backwards, the last layer, and a test."""

    @property
    def clients(self) -> Sequence[ClientInfo]: ...

    @property
    def lr(self) -> float: ...

    def initial_model(self, run: str) -> Tensor:
        """w^(0) of a run."""
        ...

    def train(self, request: TrainRequest) -> ClientUpdates:
        """One round of local updates from w^(t)."""
        ...

    def backprop(self, request: TrainRequest, present: Tensor, adjoints: Tensor) -> Tensor:
        """The exact local part of the adjoint, walked backwards through round t.

        Given q_k = dL/d(w_k − w^(t)) as `adjoints[P, d]`, returns what the present clients add to λ_t:
        Σ_k (∂(w_k − w^(t))/∂w^(t))ᵀ q_k, their outer losses along the way included.
        """
        ...

    def outer(self, request: TrainRequest) -> OuterLossResult:
        """The last layer: all clients, all minibatches of all epochs, no update."""
        ...

    def evaluate(self, model: Tensor) -> Evaluation:
        """Accuracy and loss on the test set, which no client ever sees."""
        ...


@runtime_checkable
class TrainsTogether(Protocol):
    """A federation that can do rounds of several runs at once, faster than one after the other."""

    @property
    def max_parallel_runs(self) -> int:
        """How many runs are worth going in step."""
        ...

    def train_together(self, requests: Sequence[TrainRequest]) -> Sequence[ClientUpdates]:
        """What `train` gives for each."""
        ...

    def backprop_together(
        self, requests: Sequence[TrainRequest], presents: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """What `backprop` gives for each of some rounds; in all of them somebody is present."""
        ...

    def evaluate_together(self, models: Sequence[Tensor]) -> Sequence[Evaluation]:
        """What `evaluate` gives for each."""
        ...


def max_parallel_runs(federation: Federation) -> int:
    """How many runs are worth going in step: one where the federation does them one after the other anyway."""
    return federation.max_parallel_runs if isinstance(federation, TrainsTogether) else 1


def train_all(federation: Federation, requests: Sequence[TrainRequest]) -> Sequence[ClientUpdates]:
    """`train` for each, together where the federation can."""
    if isinstance(federation, TrainsTogether):
        return federation.train_together(requests)
    return [federation.train(request) for request in requests]


def backprop_all(
    federation: Federation, requests: Sequence[TrainRequest], presents: Sequence[Tensor], adjoints: Sequence[Tensor]
) -> Sequence[Tensor]:
    """`backprop` for each, together where the federation can."""
    if isinstance(federation, TrainsTogether):
        return federation.backprop_together(requests, presents, adjoints)
    return [federation.backprop(*asked) for asked in zip(requests, presents, adjoints, strict=True)]


def evaluate_all(federation: Federation, models: Sequence[Tensor]) -> Sequence[Evaluation]:
    """`evaluate` for each, together where the federation can."""
    if isinstance(federation, TrainsTogether):
        return federation.evaluate_together(models)
    return [federation.evaluate(model) for model in models]

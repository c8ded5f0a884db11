"""The parts a federated algorithm is made of, as everything above and below them sees these.

Each is a frozen dataclass whose fields are its settings, so that it can be compared, written to a file and made again
from its name and settings (`Part.describe`, `registry.Registry.make`). Where they are implemented: `local`, `server`,
`aggregation`, `unfolding.outer_loss`, `selection`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.params import ParamLayout
from fedunfold.core.registry import Registry
from fedunfold.core.row_losses import Slopes, row_losses

if TYPE_CHECKING:
    from fedunfold.core.messages import Metric
    from fedunfold.core.task import Task

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Part:
    """A named choice with settings."""

    name: ClassVar[str]

    def describe(self) -> dict[str, Any]:
        """Its name and settings in plain values."""
        return {"name": self.name} | {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class LocalOptimizer(Part, ABC):
    """How client k gets from w^(t) to w_k, as a pair of pure functions (init, step).

        state ← init(w^(t));   for every minibatch b:  w, state ← step(w, ∇ℓ_b(w), state, η_k, w^(t))

    with η_k = η c_k. All clients of a round step at once: w, gradient and state are [clients, d] over the trainable
    parameters, η_k is [clients, 1]. The backward pass differentiates any pure step:

        (p, σ) ← (∂step/∂(w, state))ᵀ (p, σ) + H_b (∂step/∂gradient)ᵀ (p, σ)        (first order drops H_b)
    """

    def init(self, params: Tensor) -> State:
        """The optimiser's state before a client's first step."""
        return ()

    @abstractmethod
    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        """(w, ∇ℓ_b(w), state) -> (next w, next state); nothing is changed in place."""

    @property
    def fused_mu(self) -> float | None:
        """μ, where a step is w − η_k (∇ℓ + μ (w − w^(t))): compiled code carries out such steps. None otherwise."""
        return None

    @property
    def uses_gradients_only(self) -> bool:
        """Whether w_k − w^(t) is a function of the gradients alone, as with momentum and not with weight decay: the
        first-order adjoint then needs no backward pass through the steps."""
        return self.fused_mu is not None

    @property
    def normalized(self) -> bool:
        """Whether all clients' updates are scaled to the same number of steps."""
        return False

    def scales(self, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
        """Per client (c_k on η inside the loop, the factor on w_k − w^(t) after it).

        Args:
            num_examples: N_k of the clients sampled for the round, 0 for all others.
            num_steps: τ_k, 0 for a client that makes no step.
            lr: η.
        """
        ones = np.ones(len(num_examples))
        return ones, ones

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        """a_τ for τ = 0 … steps−1: how much the gradient met at step τ counts in w^(t) − w_k, over η."""
        return np.ones(steps)


@dataclass(frozen=True)
class RoundInfo:
    """What a server optimiser may look at beside the direction; constants for the adjoint.

    Attributes:
        round: t.
        layout: What the entries of a model are.
        coefficients: α_k of the clients that entered the direction, [n].
        norms: ‖Δ_k‖ of these, [n]; None where updates are secure, or remembered from other rounds.
        num_examples: N_k of these, [n].
        num_steps: τ_k of these, [n].
        spread: mean_k ‖Δ_k − Δ̄‖ of every layer, [L]; None unless the server `reads_spread`.
    """

    round: int
    layout: ParamLayout
    coefficients: Tensor
    norms: Tensor | None
    num_examples: Tensor
    num_steps: Tensor
    spread: Tensor | None = None


@dataclass(frozen=True)
class ServerOptimizer(Part, ABC):
    """What the server does with the direction u = s Σ_k α_k Δ_k, as a pair of pure functions (init, update)."""

    reads_spread: ClassVar[bool] = False
    """Whether `RoundInfo.spread` is computed for it, which takes another pass over all updates."""

    def init(self, model: Tensor) -> State:
        """The state before the first round."""
        return ()

    @abstractmethod
    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        """(w^(t), u, state) -> (w^(t+1), new state); nothing is changed in place."""

    def vjp(
        self,
        model: Tensor,
        direction: Tensor,
        state: State,
        adjoint_model: Tensor,
        adjoint_state: State,
        info: RoundInfo | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """dL/d(w^(t), u, state) from dL/d(w^(t+1), new state), for the update made at (w^(t), u, state)."""
        inputs = [tensor.detach().requires_grad_() for tensor in (model, direction, *state)]
        with torch.enable_grad():
            new_model, new_state = self.update(inputs[0], inputs[1], tuple(inputs[2:]), info)
        to_model, to_direction, *to_state = torch.autograd.grad(
            (new_model, *new_state), inputs, (adjoint_model, *adjoint_state), materialize_grads=True
        )
        return to_model, to_direction, tuple(to_state)

    def trusted_update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo, trust: float
    ) -> tuple[Tensor, State]:
        """(1 − a)(w + u) + a · update(w, u), a = `trust`, and the new state."""
        moved, after = self.update(model, direction, state, info)
        return (moved if trust == 1 else torch.lerp(model + direction, moved, trust)), after

    def trusted_vjp(
        self, at: tuple[Tensor, Tensor, State], adjoint: tuple[Tensor, State], info: RoundInfo, trust: float
    ) -> tuple[Tensor, Tensor, State, Tensor]:
        """dL/d(w, u, state, a) of `trusted_update` at (w, u, state), from dL/d(next w, next state)."""
        (model, direction, _), (to_next, to_state) = at, adjoint
        to_trust = to_next @ (self.update(*at, info)[0] - model - direction)
        if trust == 1:
            return *self.vjp(*at, to_next, to_state, info), to_trust
        to_model, to_direction, before = self.vjp(*at, trust * to_next, to_state, info)
        plain = (1 - trust) * to_next
        return to_model + plain, to_direction + plain, before, to_trust


@dataclass(frozen=True)
class Aggregator(Part, ABC):
    """How the updates that enter a round become one direction."""

    is_linear: ClassVar[bool] = False
    """Whether that is Σ_k α_k m_k, which secure sums and the adjoint of the weights need."""

    @property
    def min_updates(self) -> int:
        """How many updates a round needs for a step."""
        return 0

    def check_enough(self, clients: int) -> None:
        """Refuse a federation in which no round can have a step."""

    @abstractmethod
    def combine(self, updates: Tensor, coefficients: Tensor, layout: ParamLayout) -> Tensor:
        """u from m [n, d] and α [n]; 0 where there are fewer updates than needed, or they have no weight."""


@dataclass(frozen=True)
class OuterLoss(Part, ABC):
    """What aggregation weights are learned for, in the parts an engine needs to know."""

    only_final: ClassVar[bool] = False
    """Whether only models between rounds count, and not those along local training."""
    every_round: ClassVar[bool] = False
    """Whether, of these, w^(1), …, w^(T) count, and not w^(T) alone."""
    per_epoch: ClassVar[bool] = False
    """Whether client k's terms are divided by its epochs E_k."""
    is_training_loss: ClassVar[bool] = False
    """Whether a sample's outer loss is its training loss times a coefficient."""

    @property
    def is_training_gradient(self) -> bool:
        """Whether Σ_τ ∇ℓ^out is a multiple of the sum of training gradients, which w_k already carries."""
        return False

    def class_weights(self, label_counts: Tensor) -> Tensor | None:
        """A weight for every class from label counts [K, C] of the federation, [C]; None where all count alike."""
        return None

    def losses(self, task: "Task", outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ^out_i of every row of a minibatch, [B]; by default the training loss."""
        return task.losses(outputs, targets)

    def values(self, task: "Task", outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        """ℓ^out_i of all rows of several minibatches [L, B], and the slopes of their weighted sum (`Task.values`)."""
        losses = partial(self.losses, task)
        return row_losses(losses, outputs, targets, counts, rows_interact=task.rows_interact)


@dataclass(frozen=True)
class KnownClients:
    """What the server knows of the K clients before it samples a cohort; arrays are [K].

    Attributes:
        round: t.
        client_ids: Their names.
        num_examples: N_k.
        metrics: Of every metric that the sampler requires what each client reported when it participated last; NaN for
            one that has not yet.
    """

    round: int
    client_ids: Sequence[str]
    num_examples: np.ndarray
    metrics: "Mapping[Metric, np.ndarray]" = field(default_factory=dict)


@dataclass(frozen=True)
class ClientSampler(Part, ABC):
    """Who is sampled for a round: a pure function of tickets and of what the server knows, and not of the order of the
    clients. It is asked only where fewer than all are sampled."""

    required_metrics: "ClassVar[frozenset[Metric]]" = frozenset()
    """What clients have to report for it, a number each; the server remembers the last ones of each client."""

    @abstractmethod
    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """Indices of the clients sampled for a round.

        Args:
            tickets: A number for each client, uniform in [0, 1), drawn anew every round: all randomness there is.
            known: What the server knows of the clients.
            count: C, how many to sample.
        """

    def inclusion(self, known: KnownClients, count: int) -> np.ndarray | None:
        """π_k, the probability with which `sample` names client k, [K]; None where it is not known, and weights that
        make up for it (the rule `unbiased`) cannot be had."""
        return None


@dataclass(frozen=True)
class Selection:
    """How the cohort of a round was sampled.

    Attributes:
        sampler: By which sampler.
        known: What the server knew.
        count: C; with C = K everybody is in the cohort.
    """

    sampler: ClientSampler
    known: KnownClients
    count: int

    @property
    def inclusion(self) -> np.ndarray | None:
        """π_k, [K], where they are known."""
        everybody = len(self.known.client_ids)
        return np.ones(everybody) if self.count >= everybody else self.sampler.inclusion(self.known, self.count)


@dataclass(frozen=True)
class RoundDecision:
    """What a rule decides where it decides more than weights: u = step · Σ_k Θ_k Δ_k + momentum · u^(t−1), how far the
    step follows the server's optimiser, and by what the model is multiplied after it:

        w^(t+1) = scale · [w + (1 − trust) u + trust · (server(w, u) − w)]

    Attributes:
        weights: Θ [K] on the simplex.
        step: s ≥ 0.
        momentum: β, 0 ≤ β < 1.
        trust: a in the server's optimiser, 0 ≤ a ≤ 1; at 0 it is plain averaging.
        scale: What the trained parameters are multiplied by, > 0; running statistics are not.

    >>> RoundDecision(torch.tensor([0.5, 0.5]), step=0.5).momentum
    0.0
    """

    weights: Tensor
    step: float = 1.0
    momentum: float = 0.0
    trust: float = 1.0
    scale: float = 1.0


LOCAL_OPTIMIZERS: Registry[LocalOptimizer] = Registry(
    "local optimiser", "fedunfold.local_optimizers", "fedunfold.local"
)
SERVER_OPTIMIZERS: Registry[ServerOptimizer] = Registry(
    "server optimiser", "fedunfold.server_optimizers", "fedunfold.server"
)
AGGREGATORS: Registry[Aggregator] = Registry("aggregator", "fedunfold.aggregators", "fedunfold.aggregation")
OUTER_LOSSES: Registry[OuterLoss] = Registry("outer loss", "fedunfold.outer_losses", "fedunfold.unfolding.outer_loss")
CLIENT_SAMPLERS: Registry[ClientSampler] = Registry(
    "client sampler", "fedunfold.client_samplers", "fedunfold.selection"
)

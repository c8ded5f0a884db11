"""What rules with parameters φ, learned by unfolding over many federations, have in common: they read a round and
decide.

    Θ_k ∝ p_k · exp(score_k)                             over the clients that enter the round, |score_k| ≤ 4
    u_t = s (1 − β) Σ_k Θ_k m_k + β u_{t−1}              s ∈ [0.1, 30],   β ∈ [0, 0.9]
    w_{t+1} = w_t + (1 − a) u_t + a (server(w_t, u_t) − w_t)             a ∈ [0, 1]

How score, s, β and a follow from what was read (`features`) is what the kinds of rules differ in. Where the score,
log s, β and a are 0 it is FedAvg: Θ = p, s = 1.

Where features lie outside the range [a, b] that φ was learned on, a rule leans back towards FedAvg: with the excess
e = Σ max(0, a − z, z − b)/(b − a) over the features of the round, and e_k with those of client k too, the score is
multiplied by exp(−e_k), and log s, β and a by exp(−e).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.arrays import Array, functions_of, numbers_of, softmax
from fedunfold.rules.features import (
    CLIENT_FEATURES,
    ROUND_FEATURES,
    Need,
    RoundFeatures,
    measure_features,
    needs_of,
    read_features,
)
from fedunfold.rules.ranges import Notes, excess, noted, remark
from fedunfold.rules.rule import State
from fedunfold.rules.size import size_shares

LOG_STEP = math.log(10)
"""s is at least 1/10, and at most 10 where nothing is known of how much clients agree."""
MOMENTUM = 0.9
SCORE = 4.0
"""A client's weight changes by at most e^±4 against its share of the samples."""


@dataclass(frozen=True)
class Decided(Generic[Array]):
    """A decision, which can be differentiated in φ where it is in tensors: Θ [K], s, β and a."""

    weights: Array
    step: Array
    momentum: Array
    trust: Array


@dataclass(frozen=True, eq=False)
class ParametricRule(ABC):
    """A rule with its parameters.

    Attributes:
        params: φ by name.
        horizon: T, where it is known.
        ranges: The smallest and the largest value of each feature that φ was learned on, [2, F+G]; None: not known.
        name: What it is called in tables.
        algorithm: What it was learned for: its server optimiser, and how that treats absent clients; None: not known.
        description: What it is, in a sentence or two.
        client_features: What it reads of each client.
        round_features: What it reads of the round.
        required_metrics: What clients have to report for it: the norms of updates that it cannot measure itself.
    """

    params: Mapping[str, Tensor] = field(repr=False)
    horizon: int | None = None
    ranges: Tensor | None = field(default=None, repr=False)
    name: str = "fedunfold"
    algorithm: Algorithm | None = None
    description: str = ""
    client_features: tuple[str, ...] = CLIENT_FEATURES
    round_features: tuple[str, ...] = ROUND_FEATURES
    required_metrics: frozenset[Metric] = field(init=False, repr=False)
    unknown: ClassVar[frozenset[Need]] = frozenset()
    """What nobody knows where a rule of this kind is used, so that it reads nothing that needs it."""

    def __post_init__(self) -> None:
        needs = needs_of(self.client_features, self.round_features)
        reported = frozenset[Metric]({"norm"} if "norms" in needs and "products" not in needs else ())
        object.__setattr__(self, "required_metrics", reported)

    def with_horizon(self, rounds: int | None) -> Self:
        """The same for a run of T rounds."""
        return replace(self, horizon=rounds)

    @classmethod
    @abstractmethod
    def initial(cls, width: int, seed: int) -> Self:
        """As it is before pre-training."""

    @classmethod
    @abstractmethod
    def shapes(
        cls, width: int, client_features: Sequence[str], round_features: Sequence[str]
    ) -> dict[str, tuple[int, ...]]:
        """Those of φ, by name, of a rule that reads these features."""

    @abstractmethod
    def answers(self, found: RoundFeatures[Array]) -> tuple[Array, Array, Array, Array]:
        """The score [n], log s, β and a in their bounds, differentiable in φ."""

    def decide(self, found: RoundFeatures[Array], num_clients: int) -> Decided[Array]:
        """Θ over all clients, s, β and a from the features of a round, differentiable in φ."""
        functions = functions_of(found.shares)
        score, log_step, momentum, trust = self.answers(found.bounded)
        lean, lean_of_clients = self._lean(found)
        theta = softmax(functions.log(found.shares) + lean_of_clients * score)
        weights = functions.zeros(num_clients, dtype=theta.dtype)
        weights[found.clients] = theta
        momentum = lean * momentum
        return Decided(weights, functions.exp(lean * log_step) * (1 - momentum), momentum, lean * trust)

    def _lean(self, found: RoundFeatures[Array]) -> tuple[Array | float, Array | float]:
        """exp(−e) and exp(−e_k), [n]."""
        if self.ranges is None:
            return 1.0, 1.0
        own, functions = found.of_clients.shape[1], functions_of(found.of_clients)
        ranges: Any = self.ranges if functions is torch else numbers_of(self.ranges)
        e = excess(found.of_round, ranges[:, own:]).sum()
        of_clients = excess(found.of_clients, ranges[:, :own]).sum(1)
        return functions.exp(-e), functions.exp(-e - of_clients)

    def params_like(self, values: Array) -> Mapping[str, Array]:
        """φ by name, in tensors or in NumPy arrays as some values are."""
        params: Any = self.params if isinstance(values, Tensor) else self._params_in_numpy
        return cast("Mapping[str, Array]", params)

    @cached_property
    def _params_in_numpy(self) -> dict[str, NDArray[Any]]:
        return {name: numbers_of(value) for name, value in self.params.items()}

    def read(self, report: ClientUpdates, state: State) -> RoundFeatures[Tensor]:
        """The features of a round."""
        return read_features(report, state, self.horizon, self.client_features, self.round_features)

    def __call__(self, report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        clients = numbers_of(report.entering.clients)
        if not len(clients):
            return RoundDecision(size_shares(report)), state
        if not numbers_of(report.num_examples)[clients].sum() > 0:
            raise InputError(
                f"round {report.round}: all clients report 0 samples; rule '{self.name}' needs their numbers."
            )
        found = measure_features(report, state, self.horizon, self.client_features, self.round_features)
        decision, after = self.settled(self.decide(found, len(report.client_ids)), found)
        if self.ranges is None:
            return decision, after
        outside: Notes = (state or {}).get("outside", {})
        notes = noted(joined(found), numbers_of(self.ranges), report.round, outside)
        return decision, after | {"outside": notes}

    def remarks(self, state: State) -> tuple[str, ...]:
        """What there is to say about a run that ended in this state: where it leaned back towards FedAvg."""
        if self.ranges is None or not (outside := (state or {}).get("outside")):
            return ()
        return (remark(outside, (*self.client_features, *self.round_features), self.ranges),)

    def renamed(self, state: State, before: str, after: str) -> State:
        """The state where a client turns out to have another id: its rounds add up."""
        seen = dict((state or {}).get("seen", {}))
        if before not in seen:
            return state
        earlier, own = seen.pop(before), seen.get(after, [0.0, -math.inf])
        latest = max(earlier, own, key=lambda known: known[1])
        return state | {"seen": seen | {after: [earlier[0] + own[0], *latest[1:]]}}

    def settled(self, decided: Decided[Array], found: RoundFeatures[Array]) -> tuple[RoundDecision, dict[str, Any]]:
        """The decision in plain numbers, and the state for the next round."""
        weights = numbers_of(decided.weights)
        step, momentum, trust = (float(numbers_of(x)) for x in (decided.step, decided.momentum, decided.trust))
        state = found.state
        if found.squares is not None:
            state = state | {"square": float(weights[numbers_of(found.clients)] @ numbers_of(found.squares))}
        if "last_step" in self.round_features:
            state = state | {"log_step": math.log(step / (1 - momentum))}
        return RoundDecision(torch.from_numpy(weights), step, momentum, trust), state


def bounded_share(x: Array) -> Array:
    """x²/(1 + x²), from 0, where x is 0, to 1."""
    share: Array = x * x / (1 + x * x)
    return share


def flattened(params: Mapping[str, Tensor]) -> Tensor:
    """φ as one vector."""
    return torch.cat([value.flatten() for value in params.values()])


def unflattened(theta: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """φ by name from one vector, with the names and shapes of others."""
    parts = torch.split(theta, [value.numel() for value in like.values()])
    # Copies, since products round differently where memory begins elsewhere, and what is resumed begins elsewhere.
    return {name: part.reshape(value.shape).clone() for (name, value), part in zip(like.items(), parts, strict=True)}


def joined(found: RoundFeatures[Array]) -> Array:
    """A client's features and then those of the round, [n, F+G]."""
    functions, shape = functions_of(found.of_clients), (found.of_clients.shape[0], found.of_round.shape[0])
    both: Array = functions.concatenate([found.of_clients, functions.broadcast_to(found.of_round, shape)], 1)
    return both

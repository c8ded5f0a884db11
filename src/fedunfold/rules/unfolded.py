"""A rule with parameters φ, learned by unfolding over many federations: it reads a round and decides.

    h_k = enc_φ(z_k, z),   h̄ = Σ_k p_k h_k                z_k, z: `features`
    Θ_k ∝ p_k · exp(score_φ(h_k, h̄))                       over the clients that enter the round
    s = s_φ(h̄, z) ∈ [e^−2, e^2],   β = β_φ(h̄, z) ∈ [0, 0.9]
    a = a_φ(h̄, z) ∈ [0, 1]
    u_t = s (1 − β) Σ_k Θ_k m_k + β u_{t−1},   w_{t+1} = w_t + (1 − a) u_t + a · (server(w_t, u_t) − w_t)

All layers are tanh layers. With φ's last layers at 0 it is FedAvg: Θ = p, s = 1, β = a = 0.

Where features lie outside the range [a, b] that φ was learned on, it leans back towards FedAvg: with the excess
e = Σ max(0, a − z, z − b)/(b − a) over the features of the round, and e_k with those of client k too, the score is
multiplied by exp(−e_k), and log s, β and a by exp(−e).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES, RoundFeatures, read_features
from fedunfold.rules.rule import State
from fedunfold.rules.size import size_shares

LOG_STEP = 2.0
"""s lies between e^−2 and e^2."""
MOMENTUM = 0.9
SCORE = 4.0
"""A client's weight changes by at most e^±4 against its share of the samples."""


@dataclass(frozen=True)
class Decided:
    """A decision that can be differentiated in φ: Θ [K], s, β and a."""

    weights: Tensor
    step: Tensor
    momentum: Tensor
    trust: Tensor


def initial_parameters(width: int, seed: int) -> dict[str, Tensor]:
    """φ before pre-training, which decides nearly as FedAvg does."""
    own, pooled = len(CLIENT_FEATURES), len(ROUND_FEATURES)
    shapes = {
        "encoder.0": (width, own + pooled),
        "encoder.1": (width, width),
        "score.0": (width, 2 * width),
        "score.1": (1, width),
        "step.0": (width, width + pooled),
        "step.1": (3, width),
    }
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, (rows, columns) in shapes.items():
        last = name in ("score.1", "step.1")
        weight = torch.randn(rows, columns, generator=drawn, dtype=torch.float64) / columns**0.5
        found[f"{name}.weight"] = torch.zeros_like(weight) if last else weight
        found[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float64)
    found["step.1.bias"][1:] = 0.3  # at 0 neither β nor a has a derivative
    return found


@dataclass(frozen=True, eq=False)
class UnfoldedRule:
    """The rule with its parameters.

    Attributes:
        params: φ by name.
        horizon: T, where it is known.
        ranges: The smallest and the largest value of each feature that φ was learned on, [2, F+G]; None: not known.
        name: What it is called in tables.
        required_metrics: Nothing has to be reported for it.
    """

    params: Mapping[str, Tensor]
    horizon: int | None = None
    ranges: Tensor | None = None
    name: str = "fedunfold"
    required_metrics: frozenset[Metric] = field(default=frozenset(), repr=False)

    def with_horizon(self, rounds: int | None) -> "UnfoldedRule":
        """The same for a run of T rounds."""
        return replace(self, horizon=rounds)

    def decide(self, found: RoundFeatures, num_clients: int) -> Decided:
        """Θ over all clients, s, β and a from the features of a round, differentiable in φ."""
        h = self._layer("encoder.1", self._layer("encoder.0", joined(found)).tanh()).tanh()
        mean = found.shares @ h
        score = self._layer("score.1", self._layer("score.0", torch.cat([h, mean.expand_as(h)], 1)).tanh())[:, 0]
        lean, lean_of_clients = self._lean(found)
        theta = (found.shares.log() + lean_of_clients * SCORE * (score / SCORE).tanh()).softmax(0)
        weights = theta.new_zeros(num_clients).index_add(0, found.clients, theta)
        to_step, to_momentum, to_trust = self._layer(
            "step.1", self._layer("step.0", torch.cat([mean, found.of_round])).tanh()
        )
        momentum, trust = lean * MOMENTUM * _share(to_momentum), lean * _share(to_trust)
        step = (lean * LOG_STEP * (to_step / LOG_STEP).tanh()).exp() * (1 - momentum)
        return Decided(weights, step, momentum, trust)

    def _lean(self, found: RoundFeatures) -> tuple[Tensor, Tensor]:
        """exp(−e) and exp(−e_k), [n]."""
        of_round, of_clients = found.of_round, found.of_clients
        if self.ranges is None:
            return of_round.new_ones(()), of_clients.new_ones(len(of_clients))
        lowest, highest = self.ranges
        beyond = torch.relu(torch.maximum(lowest - (z := joined(found)), z - highest)) / (highest - lowest)
        own = of_clients.shape[1]
        excess = beyond[0, own:].sum() if len(beyond) else of_round.new_zeros(())
        return (-excess).exp(), (-excess - beyond[:, :own].sum(1)).exp()

    def _layer(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])

    def read(self, report: ClientUpdates, state: State) -> RoundFeatures:
        """The features of a round."""
        return read_features(report, state, self.horizon)

    def __call__(self, report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        if not len(report.entering.clients):
            return RoundDecision(size_shares(report)), state
        found = self.read(report, state)
        with torch.no_grad():
            decided = self.decide(found, len(report.client_ids))
        return self.settled(decided, found, report)

    def settled(
        self, decided: Decided, found: RoundFeatures, report: ClientUpdates
    ) -> tuple[RoundDecision, dict[str, Any]]:
        """The decision in plain numbers, and the state with this round's direction in it."""
        weights = decided.weights.detach()
        direction = report.layout.params(report.entering.weighted_sum(weights).total)
        numbers = (float(number.detach()) for number in (decided.step, decided.momentum, decided.trust))
        decision = RoundDecision(weights, *numbers)
        return decision, found.state | {"previous": direction}


def joined(found: RoundFeatures) -> Tensor:
    """A client's features and then those of the round, [n, F+G]."""
    return torch.cat([found.of_clients, found.of_round.expand(len(found.clients), -1)], 1)


def _share(x: Tensor) -> Tensor:
    """x² / (1 + x²): from 0, where x is 0, to 1."""
    return x.square() / (1 + x.square())

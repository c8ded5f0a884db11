"""A rule with parameters φ, learned by unfolding over many federations: it reads a round and decides.

    h_k = enc_φ(z_k, z),   h̄ = Σ_k p_k h_k                z_k, z: `features`
    Θ_k ∝ p_k · exp(score_φ(h_k, h̄))                       over the clients that enter the round
    s = s_φ(h̄, z) ∈ [e^−2, e^2],   β = β_φ(h̄, z) ∈ [0, 0.9]
    u_t = s (1 − β) Σ_k Θ_k m_k + β u_{t−1}

All layers are tanh layers. With φ's last layers at 0 it is FedAvg: Θ = p, s = 1, β = 0.

Where features lie outside the range [a, b] that φ was learned on, it leans back towards FedAvg: with the excess
e = Σ max(0, a − z, z − b)/(b − a) over the features of the round, and e_k with those of client k too, the score is
multiplied by exp(−e_k), and log s and β by exp(−e).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES, RoundFeatures, read_features
from fedunfold.rules.ranges import Notes, excess, noted, remark
from fedunfold.rules.rule import State
from fedunfold.rules.size import size_shares

LOG_STEP = 2.0
"""s lies between e^−2 and e^2."""
MOMENTUM = 0.9
SCORE = 4.0
"""A client's weight changes by at most e^±4 against its share of the samples."""


@dataclass(frozen=True)
class Decided:
    """A decision that can be differentiated in φ: Θ [K], s and β."""

    weights: Tensor
    step: Tensor
    momentum: Tensor


def layer_shapes(width: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every layer, by its name."""
    own, pooled = len(CLIENT_FEATURES), len(ROUND_FEATURES)
    return {
        "encoder.0": (width, own + pooled),
        "encoder.1": (width, width),
        "score.0": (width, 2 * width),
        "score.1": (1, width),
        "step.0": (width, width + pooled),
        "step.1": (2, width),
    }


def initial_parameters(width: int, seed: int) -> dict[str, Tensor]:
    """φ before pre-training, which decides as FedAvg does."""
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, (rows, columns) in layer_shapes(width).items():
        last = name in ("score.1", "step.1")
        weight = torch.randn(rows, columns, generator=drawn, dtype=torch.float64) / columns**0.5
        found[f"{name}.weight"] = torch.zeros_like(weight) if last else weight
        found[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float64)
    return found


@dataclass(frozen=True, eq=False)
class UnfoldedRule:
    """The rule with its parameters.

    Attributes:
        params: φ by name.
        horizon: T, where it is known.
        ranges: The smallest and the largest value of each feature that φ was learned on, [2, F+G]; None: not known.
        name: What it is called in tables.
        algorithm: What it was learned for: its server optimiser, and how that treats absent clients; None: not known.
        description: What it is, in a sentence or two.
        required_metrics: Nothing has to be reported for it.
    """

    params: Mapping[str, Tensor]
    horizon: int | None = None
    ranges: Tensor | None = None
    name: str = "fedunfold"
    algorithm: Algorithm | None = None
    description: str = ""
    required_metrics: frozenset[Metric] = field(default=frozenset(), repr=False)

    def with_horizon(self, rounds: int | None) -> "UnfoldedRule":
        """The same for a run of T rounds."""
        return replace(self, horizon=rounds)

    def decide(self, found: RoundFeatures, num_clients: int) -> Decided:
        """Θ over all clients, s and β from the features of a round, differentiable in φ."""
        h = self._layer("encoder.1", self._layer("encoder.0", joined(found)).tanh()).tanh()
        mean = found.shares @ h
        score = self._layer("score.1", self._layer("score.0", torch.cat([h, mean.expand_as(h)], 1)).tanh())[:, 0]
        lean, lean_of_clients = self._lean(found)
        theta = (found.shares.log() + lean_of_clients * SCORE * (score / SCORE).tanh()).softmax(0)
        weights = theta.new_zeros(num_clients).index_add(0, found.clients, theta)
        to_step, to_momentum = self._layer("step.1", self._layer("step.0", torch.cat([mean, found.of_round])).tanh())
        momentum = lean * MOMENTUM * to_momentum.square() / (1 + to_momentum.square())
        return Decided(weights, (lean * LOG_STEP * (to_step / LOG_STEP).tanh()).exp() * (1 - momentum), momentum)

    def _lean(self, found: RoundFeatures) -> tuple[Tensor, Tensor]:
        """exp(−e) and exp(−e_k), [n]."""
        of_round, of_clients = found.of_round, found.of_clients
        if self.ranges is None:
            return of_round.new_ones(()), of_clients.new_ones(len(of_clients))
        beyond, own = excess(joined(found), self.ranges), of_clients.shape[1]
        e = beyond[0, own:].sum() if len(beyond) else of_round.new_zeros(())
        return (-e).exp(), (-e - beyond[:, :own].sum(1)).exp()

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
        decision, after = self.settled(decided, found, report)
        if self.ranges is None:
            return decision, after
        outside: Notes = (state or {}).get("outside", {})
        return decision, after | {"outside": noted(joined(found), self.ranges, report.round, outside)}

    def remarks(self, state: State) -> tuple[str, ...]:
        """What there is to say about a run that ended in this state: where it leaned back towards FedAvg."""
        if self.ranges is None or not (outside := (state or {}).get("outside")):
            return ()
        return (remark(outside, (*CLIENT_FEATURES, *ROUND_FEATURES), self.ranges),)

    def settled(
        self, decided: Decided, found: RoundFeatures, report: ClientUpdates
    ) -> tuple[RoundDecision, dict[str, Any]]:
        """The decision in plain numbers, and the state with this round's direction in it."""
        weights = decided.weights.detach()
        direction = report.layout.params(report.entering.weighted_sum(weights).total)
        decision = RoundDecision(weights, float(decided.step.detach()), float(decided.momentum.detach()))
        return decision, found.state | {"previous": direction}


def joined(found: RoundFeatures) -> Tensor:
    """A client's features and then those of the round, [n, F+G]."""
    return torch.cat([found.of_clients, found.of_round.expand(len(found.clients), -1)], 1)

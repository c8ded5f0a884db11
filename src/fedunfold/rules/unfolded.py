"""A rule whose parameters φ are those of a small network (`parametric`).

    h_k = enc_φ(z_k, z),   h̄ = Σ_k p_k h_k                z_k, z: `features`
    score_k = 4 tanh(score_φ(h_k, h̄)/4),   log s = L tanh(s_φ(h̄, z)/L),   β = 0.9 q(β_φ(h̄, z)),
    a = q(a_φ(h̄, z)),   q(x) = x²/(1 + x²)
    L = log 10 where s < 1, else log min(30, 4 √(Σ_k p_k ‖m_k‖²) / ‖Σ_k p_k m_k‖)

So a step is at most about four times as long as a usual update of a client: beyond lies where no client has been.
Longer ones help many federations, but in some they silence all units of a layer for good, and a rule cannot learn to
keep from that, since from there no gradient leads back. A rule that does not read the spread has L = log 10.

All layers are tanh layers. With φ's last layers at 0 it is FedAvg: Θ = p, s = 1, β = a = 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedunfold.rules.arrays import Array, functions_of
from fedunfold.rules.features import (
    CLIENT_FEATURES,
    PRIVATE_CLIENT_FEATURES,
    PRIVATE_ROUND_FEATURES,
    ROUND_FEATURES,
    Need,
    RoundFeatures,
)
from fedunfold.rules.parametric import LOG_STEP, MOMENTUM, SCORE, ParametricRule, bounded_share

OF_UPDATES = 4.0
"""A step is at most so many times as long as a usual update of a client."""
LONGEST = 30.0


def layer_shapes(width: int, own: int, pooled: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every layer, by its name, for F = `own` client features and G = `pooled` of the round."""
    return {
        "encoder.0": (width, own + pooled),
        "encoder.1": (width, width),
        "score.0": (width, 2 * width),
        "score.1": (1, width),
        "step.0": (width, width + pooled),
        "step.1": (3, width),
    }


def initial_parameters(
    width: int, seed: int, own: int = len(CLIENT_FEATURES), pooled: int = len(ROUND_FEATURES)
) -> dict[str, Tensor]:
    """φ before pre-training, which decides nearly as FedAvg does.

    Args:
        width: Of all layers.
        seed: Draws them.
        own: F, how many features of a client it reads.
        pooled: G, how many of the round.
    """
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, (rows, columns) in layer_shapes(width, own, pooled).items():
        last = name in ("score.1", "step.1")
        weight = torch.randn(rows, columns, generator=drawn, dtype=torch.float64) / columns**0.5
        found[f"{name}.weight"] = torch.zeros_like(weight) if last else weight
        found[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float64)
    found["step.1.bias"][1:] = 0.3  # at 0 neither β nor a has a derivative
    return found


@dataclass(frozen=True, eq=False)
class UnfoldedRule(ParametricRule):
    """The rule as a network."""

    @classmethod
    def initial(cls, width: int, seed: int) -> Self:
        """As it is before pre-training."""
        return cls(initial_parameters(width, seed, len(cls.client_features), len(cls.round_features)))

    @classmethod
    def shapes(
        cls, width: int, client_features: Sequence[str], round_features: Sequence[str]
    ) -> dict[str, tuple[int, ...]]:
        """Those of φ, by name, of a rule that reads these features."""
        layers = layer_shapes(width, len(client_features), len(round_features))
        weights: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in layers.items()}
        return weights | {f"{name}.bias": shape[:1] for name, shape in layers.items()}

    def answers(self, found: RoundFeatures[Array]) -> tuple[Array, Array, Array, Array]:
        """The score [n], log s, β and a."""
        functions, h = functions_of(found.shares), self.encoded(found)
        mean = found.shares @ h
        score = self._layer("score.1", functions.tanh(self._layer("score.0", h, mean)))[:, 0]
        pooled = functions.tanh(self._layer("step.0", mean, found.of_round))
        to_step, to_momentum, to_trust = self._layer("step.1", pooled)
        bound = self.longest_step(found) if to_step > 0 else LOG_STEP
        step = bound * functions.tanh(to_step / bound)
        momentum, trust = MOMENTUM * bounded_share(to_momentum), bounded_share(to_trust)
        return SCORE * functions.tanh(score / SCORE), step, momentum, trust

    def longest_step(self, found: RoundFeatures[Array]) -> Array | float:
        """L where s > 1."""
        if "spread" not in self.round_features:
            return LOG_STEP
        spread = found.of_round[self.round_features.index("spread")]
        longest: Array = (math.log(OF_UPDATES) + spread / 2).clip(None, math.log(LONGEST))
        return longest

    def encoded(self, found: RoundFeatures[Array]) -> Array:
        """h, [n, width]."""
        tanh = functions_of(found.of_clients).tanh
        h: Array = tanh(self._layer("encoder.1", tanh(self._layer("encoder.0", found.of_clients, found.of_round))))
        return h

    def _layer(self, name: str, x: Array, shared: Array | None = None) -> Array:
        """W (x, y) + b of x [n, I] or [I] and, where there is one, a `shared` y [J] of all rows."""
        params = self.params_like(x)
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        own = x.shape[-1]
        found: Array = x @ weight[:, :own].T + (bias if shared is None else weight[:, own:] @ shared + bias)
        return found


@dataclass(frozen=True, eq=False)
class PrivateRule(UnfoldedRule):
    """The same network on what a server of secure sums knows: no single update, and no two updates compared."""

    name: str = "fedunfold-private"
    client_features: tuple[str, ...] = PRIVATE_CLIENT_FEATURES
    round_features: tuple[str, ...] = PRIVATE_ROUND_FEATURES
    unknown: ClassVar[frozenset[Need]] = frozenset({"products"})

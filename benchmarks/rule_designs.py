"""Other designs of a rule than the one that comes with the package, for the study of what helps (`pretraining_study`).

Each takes the place of the network in one pre-training; none can be saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from fedunfold.pretraining.distribution import Distribution, DrawnFederation
from fedunfold.rules.arrays import Array, functions_of, softmax
from fedunfold.rules.features import ROUND_FEATURES, RoundFeatures
from fedunfold.rules.unfolded import UnfoldedRule

EASY = 0.25
"""A curriculum begins with ranges of so much of their length, and has all of it after half of its federations."""


class Pooling(UnfoldedRule):
    """A rule whose clients see more of each other than the mean: h_k ← tanh(V h_k + …) once more before the score."""

    extra: ClassVar[Mapping[str, int]] = {}
    """Further layers of the rule's width: how many times the width each takes in."""

    @classmethod
    def initial(cls, width: int, seed: int) -> Self:
        plain = UnfoldedRule.initial(width, seed).params
        drawn = torch.Generator().manual_seed(seed + 1)
        shapes = {f"{name}.weight": (width, inputs * width) for name, inputs in cls.extra.items()}
        added = {
            name: torch.randn(shape, generator=drawn, dtype=torch.float64) / shape[1] ** 0.5
            for name, shape in shapes.items()
        }
        return cls({**plain, **added})

    def encoded(self, found: RoundFeatures[Array]) -> Array:
        return self.mixed(super().encoded(found), found.shares)

    def mixed(self, h: Array, shares: Array) -> Array:
        raise NotImplementedError


class Attending(Pooling):
    """h_k + Σ_j A_kj V h_j,   A = softmax over j of ⟨Q h_k, K h_j⟩/√width + log p_j."""

    extra: ClassVar[Mapping[str, int]] = {"query": 1, "key": 1, "value": 1}

    def mixed(self, h: Array, shares: Array) -> Array:
        params = self.params_like(h)
        query, key, value = (h @ params[f"{name}.weight"].T for name in self.extra)
        among = softmax(query @ key.T / h.shape[1] ** 0.5 + functions_of(shares).log(shares))
        mixed: Array = h + among @ value
        return mixed


class Deeper(Pooling):
    """h_k + tanh(V (h_k, h̄)): a second layer that sees the mean of all clients."""

    extra: ClassVar[Mapping[str, int]] = {"again": 2}

    def mixed(self, h: Array, shares: Array) -> Array:
        functions, weight = functions_of(h), self.params_like(h)["again.weight"]
        of_mean = weight[:, h.shape[1] :] @ (shares @ h)
        mixed: Array = h + functions.tanh(h @ weight[:, : h.shape[1]].T + of_mean)
        return mixed


@dataclass(frozen=True, eq=False)
class LongSteps(UnfoldedRule):
    """Steps of up to e^4 times plain averaging's, however much clients agree."""

    def longest_step(self, found: RoundFeatures[Array]) -> float:
        return 4.0


@dataclass(frozen=True, eq=False)
class WithoutLastStep(UnfoldedRule):
    """It does not know how long its own last step was."""

    round_features: tuple[str, ...] = tuple(name for name in ROUND_FEATURES if name != "last_step")


@dataclass(frozen=True, eq=False)
class WithoutUnevenness(UnfoldedRule):
    """It does not know how unevenly coordinates move."""

    round_features: tuple[str, ...] = tuple(name for name in ROUND_FEATURES if name != "unevenness")


class Curriculum(Distribution):
    """Few clients and rounds at first, all of them in the second half.

    Attributes:
        federations: How many are drawn to learn on.
    """

    federations: int

    def draw(self, number: int, purpose: str = "train") -> DrawnFederation:
        names = ("clients", "sampled_clients", "rounds")
        part = min(1.0, EASY + (1 - EASY) * 2 * number / self.federations) if purpose == "train" else 1.0
        drawn = {name: getattr(self, name) for name in Distribution.model_fields}
        for name in names:
            low, high = drawn[name]
            drawn[name] = low, round(low * (high / low) ** part)
        return Distribution(**drawn).draw(number, purpose)

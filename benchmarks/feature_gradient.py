"""How far the gradient a rule is learned by is from the full one: the first takes what the rule reads as constant.

    cos(Vg, d),   g = dL/dφ by the exact adjoint,   d_i = (L(φ + ε v_i) − L(φ − ε v_i))/2ε,   V = (v_1, …, v_n)ᵀ

with random directions v_i. L is that of pre-training, Σ_t F(w^(t)); a change of φ changes the models, these the next
rounds' features, and d sees that. Where features were constants, d would be Vg but for ε.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.federations import JudgedOnHeldOut
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.pretrained import pretrained
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.rule_gradient import rule_gradient

Log = Callable[[str], None]
RUN = "trial-0"
EPSILON = 1e-8
"""In double precision. At 1e-5 a run meets other kinks of its ReLUs on either side, and the slope is another one."""
SMALL = Distribution(rounds=(5, 20), samples=(400, 1200), sampled_clients=(12, 40), cohort=(4, 10), bad=0.0)
"""Federations small enough for hundreds of runs each."""


@dataclass(frozen=True)
class FeatureGradient:
    """One federation.

    Attributes:
        federation: Its number.
        rounds: T.
        cosine: Of the two gradients along the directions.
        ratio: ‖Vg‖/‖d‖.
    """

    federation: int
    rounds: int
    cosine: float
    ratio: float


@dataclass(frozen=True)
class FeatureGradients:
    """All that was measured."""

    rule: str
    directions: int
    rows: Sequence[FeatureGradient]

    @property
    def median(self) -> float:
        """The median cosine."""
        return statistics.median(row.cosine for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"rule": self.rule, "directions": self.directions, "median": self.median, "rows": rows}


def measure_feature_gradients(name: str, federations: int, directions: int, log: Log) -> FeatureGradients:
    """The cosines in so many drawn federations, along so many directions each."""
    rule = replace(pretrained(name), ranges=None)  # as while it is learned
    if rule.algorithm is None:
        raise InputError(f"{name} does not say which server it is for.")
    rows = []
    for number in range(federations):
        log(f"federation {number + 1} of {federations}")
        rows.append(_measured(rule, rule.algorithm, number, directions))
    return FeatureGradients(rule.name, directions, rows)


def _measured(rule: ParametricRule, learned_for: Algorithm, number: int, directions: int) -> FeatureGradient:
    drawn = SMALL.draw(number, "feature-gradient")
    federation, rounds = JudgedOnHeldOut(drawn, dtype=torch.float64), drawn.environment.rounds
    algorithm, own = replace(learned_for, absent=drawn.absent), rule.with_horizon(rounds)
    outer = OUTER_LOSSES.make("every-round")
    gradient = rule_gradient(federation, own, rounds, algorithm, outer, "exact", RUN).gradient

    def loss(direction: Mapping[str, Tensor], length: float) -> float:
        params = {name: value + length * direction[name] for name, value in own.params.items()}
        (result,) = run_rounds(federation, replace(own, params=params), rounds, [RUN], algorithm=algorithm)
        return sum(test.loss for test in result.evaluations)

    random = torch.Generator().manual_seed(number)
    constant, full = [], []
    for _ in range(directions):
        v = {name: torch.randn(g.shape, dtype=g.dtype, generator=random) for name, g in gradient.items()}
        constant.append(sum(float((v[name] * g).sum()) for name, g in gradient.items()))
        full.append((loss(v, EPSILON) - loss(v, -EPSILON)) / (2 * EPSILON))
    g, d = torch.tensor(constant), torch.tensor(full)
    return FeatureGradient(number, rounds, float(torch.cosine_similarity(g, d, dim=0)), float(g.norm() / d.norm()))


def feature_gradient_page(found: FeatureGradients) -> str:
    """What was measured, in Markdown."""
    lines = [
        "# The gradient through what a rule reads",
        "",
        f"Made by `python -m benchmarks feature-gradient`: rule {found.rule}, {found.directions} random directions.",
        "The cosine is that between the gradient a rule is learned by, for which features are constants, and the full",
        f"one, by central differences. Median: {found.median:.3f}.",
        "",
        "| federation | rounds | cosine | ratio of lengths |",
        "|---|---|---|---|",
        *(f"| {row.federation} | {row.rounds} | {row.cosine:.3f} | {row.ratio:.2f} |" for row in found.rows),
    ]
    return "\n".join(lines) + "\n"

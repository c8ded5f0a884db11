"""How far the gradient a rule is learned by is from the full one: the first takes what the rule reads as constant.

    cos(Vg, d),   g = dL/dφ by the exact adjoint,   d_i = (L(φ + ε v_i) − L(φ − ε v_i))/2ε,   V = (v_1, …, v_n)ᵀ

with random directions v_i. L is Σ_t F(w^(t)) on held-out rows, as in pre-training; a change of φ changes the models,
these the next rounds' features, and d sees that. Where features were constants, d would be Vg but for ε. The same runs
make what evolution strategies would learn by, Σ_i d_i v_i / n, for 2n runs where the adjoint takes about four.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.federations import HeldOutLoss, JudgedOnHeldOut
from fedunfold.rules.parametric import ParametricRule, flattened
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
        evolution: cos(Vᵀd, g), of the estimate by evolution strategies.
    """

    federation: int
    rounds: int
    cosine: float
    ratio: float
    evolution: float


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

    @property
    def median_of_evolution(self) -> float:
        """That of evolution strategies."""
        return statistics.median(row.evolution for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        medians = {"median": self.median, "median_of_evolution": self.median_of_evolution}
        rows = [asdict(row) for row in self.rows]
        return {"rule": self.rule, "directions": self.directions, **medians, "rows": rows}


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
    gradient = rule_gradient(federation, own, rounds, algorithm, HeldOutLoss(), "exact", RUN).gradient

    def loss(direction: Mapping[str, Tensor], length: float) -> float:
        params = {name: value + length * direction[name] for name, value in own.params.items()}
        (result,) = run_rounds(federation, replace(own, params=params), rounds, [RUN], algorithm=algorithm)
        return sum(test.loss for test in result.evaluations)

    random = torch.Generator().manual_seed(number)
    g, slopes, drawn_directions = flattened(gradient), [], []
    for _ in range(directions):
        v = {name: torch.randn(part.shape, dtype=part.dtype, generator=random) for name, part in gradient.items()}
        slopes.append((loss(v, EPSILON) - loss(v, -EPSILON)) / (2 * EPSILON))
        drawn_directions.append(flattened(v))
    d, along = torch.tensor(slopes, dtype=g.dtype), torch.stack(drawn_directions)
    constant = along @ g
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in ((constant, d), (d @ along, g))]
    return FeatureGradient(number, rounds, cosines[0], float(constant.norm() / d.norm()), cosines[1])


def feature_gradient_page(found: FeatureGradients) -> str:
    """What was measured, in Markdown."""
    lines = [
        "# The gradient through what a rule reads",
        "",
        f"Made by `python -m benchmarks feature-gradient`: rule {found.rule}, {found.directions} random directions.",
        "The cosine is that between the gradient a rule is learned by, for which features are constants, and the full",
        f"one, by central differences. Median: {found.median:.3f}. An estimate by evolution strategies from the same",
        f"{2 * found.directions} runs has this cosine to the first gradient, which takes about four runs; median:",
        f"{found.median_of_evolution:.3f}.",
        "",
        "| federation | rounds | cosine | ratio of lengths | cosine by evolution strategies |",
        "|---|---|---|---|---|",
        *map(_line, found.rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: FeatureGradient) -> str:
    cells = str(row.federation), str(row.rounds), f"{row.cosine:.3f}", f"{row.ratio:.2f}", f"{row.evolution:.3f}"
    return f"| {' | '.join(cells)} |"

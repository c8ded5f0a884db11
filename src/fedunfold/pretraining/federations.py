"""What one drawn federation tells about a rule: its gradient, how much better than FedAvg it is, what it met there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, TrainRequest
from fedunfold.core.outcomes import Evaluation, OuterLossResult
from fedunfold.core.parts import ServerOptimizer
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.pretraining.distribution import Distribution, DrawnFederation
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.parametric import ParametricRule, joined
from fedunfold.rules.rule import Decided, State, WeightingRule
from fedunfold.rules.size import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.unfolding.outer_loss import Final
from fedunfold.unfolding.rule_gradient import rule_gradient

RUN = "trial-0"
FLOOR = 0.1
"""Added to losses before their logarithm is taken: what is nearly learned at once counts for little."""
LAST_ROUNDS = 3
"""The final score is the mean of so many rounds: with sampled clients it changes from round to round."""


@dataclass(frozen=True)
class MetaGradient:
    """What a federation says about φ.

    Attributes:
        loss: Σ_t r_t (F(w^(t)) + …) / (T F(w^(0))), t = 1 … T, as `JudgedOnHeldOut` has it.
        fedavg_loss: The same of FedAvg.
        gradient: d log(FLOOR + loss)/dφ by name; None where the run or the gradient was not finite.
    """

    loss: float
    fedavg_loss: float
    gradient: Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Gain:
    """How a rule fared in a federation it was not learned on, in percentage points above FedAvg.

    Attributes:
        final: Of the last rounds.
        mean: Of all rounds.
        ranges: The smallest and the largest value of each feature it met, [2, F+G]; None where it diverged.
    """

    final: float
    mean: float
    ranges: Tensor | None


@dataclass(frozen=True)
class HeldOutLoss(Final):
    """The mean loss of held-out rows after every round (`tempered_loss`), classes as they occur, as in a test."""

    name: ClassVar[str] = "held-out"
    every_round: ClassVar[bool] = True


class JudgedOnHeldOut(SimulatedFederation):
    """A federation whose outer loss is that on data no client trains on, where rounds worse than FedAvg's count more.
    The loss of its tests is the same F.

        r_t (F(w) + (c − 1) max(0, F(w) − F_t)),   r_t ∝ t^lateness, with the mean 1 over t = 1 … T

    Args:
        drawn: The federation.
        fedavg: F_t, that of FedAvg after rounds 1 … T; without them no round counts more than r_t.
        lateness: How much more the models of later rounds count; 0: all alike.
        caution: c ≥ 1, how much more what is lost against FedAvg counts.
        dtype: Of the models.
    """

    def __init__(
        self,
        drawn: DrawnFederation,
        fedavg: Sequence[float] = (),
        lateness: float = 0.0,
        caution: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(drawn.environment, dtype=dtype)
        self.held_out = SimulatedFederation(drawn.held_out, dtype=dtype)
        raised = np.arange(drawn.environment.rounds + 1) ** lateness
        self._coefficients: list[float] = (raised / raised[1:].mean()).tolist()
        self._fedavg, self._caution = [math.inf, *(fedavg or [math.inf] * drawn.environment.rounds)], caution

    @property
    def fedavg_loss(self) -> float:
        """Σ_t r_t F_t, what FedAvg comes to by the same loss."""
        return sum(r * loss for r, loss in zip(self._coefficients[1:], self._fedavg[1:], strict=True))

    def evaluate(self, models: Sequence[Tensor]) -> list[Evaluation]:
        judged = zip(super().evaluate(models), self.held_out.evaluate(models), strict=True)
        return [replace(test, loss=held_out.loss) for test, held_out in judged]

    def outer_loss(self, requests: Sequence[TrainRequest]) -> list[OuterLossResult]:
        found = zip(self.held_out.outer_loss(requests), requests, strict=True)
        return [self._counted(met, request.round) for met, request in found]

    def _counted(self, met: OuterLossResult, t: int) -> OuterLossResult:
        r, lost = self._coefficients[t], max(0.0, met.loss - self._fedavg[t])
        slope = r * (self._caution if lost else 1.0)
        return OuterLossResult(r * (met.loss + (self._caution - 1) * lost), slope * met.gradient)


def meta_gradient(
    distribution: Distribution,
    number: int,
    params: Mapping[str, Tensor],
    adjoint: AdjointKind,
    server: ServerOptimizer,
    family: Family = "network",
    lateness: float = 0.0,
    caution: float = 1.0,
) -> MetaGradient:
    """Draw federation `number` and differentiate its loss through all rounds in φ."""
    drawn = distribution.draw(number)
    rounds, algorithm = drawn.environment.rounds, Algorithm(server=server, absent=drawn.absent)
    outer = HeldOutLoss()
    try:
        fedavg = [test.loss for test in _fedavg(drawn, JudgedOnHeldOut(drawn)).evaluations]
        federation = JudgedOnHeldOut(drawn, fedavg, lateness, caution)
        found = rule_gradient(federation, _rule(drawn, params, family), rounds, algorithm, outer, adjoint, RUN)
    except DivergenceError:  # an unlucky draw: a learning rate that no server can cope with
        return MetaGradient(math.nan, math.nan, None)
    first = algorithm.request(RUN, rounds, federation.initial_model(RUN), outer=outer)
    scale = 1 / (rounds * federation.held_out.outer_loss([first])[0].loss)
    loss = scale * found.loss
    gradient = {name: scale / (FLOOR + loss) * slope for name, slope in found.gradient.items()}
    finite = all(bool(slope.isfinite().all()) for slope in gradient.values())
    return MetaGradient(loss, scale * federation.fedavg_loss, gradient if finite else None)


def validate(
    distribution: Distribution,
    number: int,
    params: Mapping[str, Tensor],
    server: ServerOptimizer,
    family: Family = "network",
) -> Gain | None:
    """How φ fares in a federation that is never learned on, with a score of 0 where it diverges; None where FedAvg does
    and where nobody ever participates."""
    drawn = distribution.draw(number, "validation")
    federation = SimulatedFederation(drawn.environment)
    noticing = _Noticing(_rule(drawn, params, family))
    try:
        fedavg = _scores(_fedavg(drawn, federation))
    except DivergenceError:
        return None
    try:
        ours = _scores(_run(drawn, federation, noticing, Algorithm(server=server, absent=drawn.absent)))
    except DivergenceError:
        return Gain(-_mean(fedavg[-LAST_ROUNDS:]), -_mean(fedavg), None)
    if not noticing.lowest:
        return None
    ranges = torch.stack([torch.stack(noticing.lowest).amin(0), torch.stack(noticing.highest).amax(0)])
    last = slice(-LAST_ROUNDS, None)
    return Gain(_mean(ours[last]) - _mean(fedavg[last]), _mean(ours) - _mean(fedavg), ranges)


class _Noticing:
    """A rule of which the range of every feature it reads is noted."""

    def __init__(self, rule: ParametricRule) -> None:
        self._rule = rule
        self.name, self.required_metrics = rule.name, rule.required_metrics
        self.lowest: list[Tensor] = []
        self.highest: list[Tensor] = []

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Decided, State]:
        if len(report.entering.clients):
            z = joined(self._rule.read(report, state).bounded)
            self.lowest.append(z.amin(0))
            self.highest.append(z.amax(0))
        return self._rule(report, state)


def _rule(drawn: DrawnFederation, params: Mapping[str, Tensor], family: Family) -> ParametricRule:
    return FAMILIES[family](params, drawn.environment.rounds if drawn.knows_horizon else None)


def _fedavg(drawn: DrawnFederation, federation: SimulatedFederation) -> RunResult:
    return _run(drawn, federation, size(), Algorithm(absent="drop"))


def _run(
    drawn: DrawnFederation, federation: SimulatedFederation, rule: WeightingRule, algorithm: Algorithm
) -> RunResult:
    (result,) = run_rounds(federation, rule, drawn.environment.rounds, [RUN], algorithm=algorithm)
    return result


def _scores(result: RunResult) -> list[float]:
    return [100 * test.score for test in result.evaluations]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""The gradient in a rule's parameters, in float64, against autograd through the fully unrolled run."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from fedunfold import server
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import OUTER_LOSSES, ServerOptimizer
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.features import RoundFeatures
from fedunfold.rules.rule import State
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.unfolding.rule_gradient import rule_gradient
from tests.support.unrolled import Unrolled
from tests.unfolding.test_gradients import RUN, SIZES, TOLERANCE, federation_of, mlp

ABSENT: tuple[Absent, ...] = ("keep", "drop", "remember")


class Reading(UnfoldedRule):
    """Notes what it read in each round."""

    def read(self, report: ClientUpdates, state: State) -> RoundFeatures:
        found = super().read(report, state)
        NOTED[report.round] = found
        return found


NOTED: dict[int, RoundFeatures] = {}


def drawn_rule(horizon: int | None = 3) -> Reading:
    """A rule far from FedAvg, whose momentum counts."""
    drawn = torch.Generator().manual_seed(5)
    params = {
        name: value + 0.5 * torch.randn(value.shape, generator=drawn, dtype=torch.float64)
        for name, value in initial_parameters(6, 0).items()
    }
    return Reading(params, horizon)


def errors(
    who: str, algorithm: Algorithm, outer: str, adjoint: AdjointKind, clients_per_round: int | None = None
) -> dict[str, float]:
    """The relative error of each parameter's gradient that does not vanish."""
    env = federation_of((5,), who).replace(clients_per_round=clients_per_round)
    federation = SimulatedFederation(env, dtype=torch.float64)
    rule = drawn_rule()
    NOTED.clear()
    ours = rule_gradient(federation, rule, env.rounds, algorithm, OUTER_LOSSES.make(outer), adjoint, RUN)
    params = {name: value.clone().requires_grad_() for name, value in rule.params.items()}
    again = replace(rule, params=params)
    sizes = torch.tensor(list(SIZES.values()), dtype=torch.float64)
    weights: list[Tensor] = []
    steps: list[Tensor] = []
    momenta: list[Tensor] = []
    trusts: list[Tensor] = []
    for t in range(env.rounds):
        if t not in NOTED:
            weights.append(sizes / sizes.sum())
            steps.append(torch.ones((), dtype=torch.float64))
            momenta.append(torch.zeros((), dtype=torch.float64))
            trusts.append(torch.ones((), dtype=torch.float64))
            continue
        decided = again.decide(NOTED[t], len(SIZES))
        weights.append(decided.weights)
        steps.append(decided.step * algorithm.step_size(t))
        momenta.append(decided.momentum)
        trusts.append(decided.trust)
    unrolled = Unrolled(env, mlp(env)(), algorithm, outer, first_order=adjoint == "first_order")
    unrolled.squares, unrolled.momenta, unrolled.trusts = False, torch.stack(momenta), torch.stack(trusts)
    loss = unrolled(torch.stack(weights), torch.stack(steps), federation.initial_model(RUN), RUN)
    assert ours.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    expected = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    assert all(float(value.norm()) > 1e-9 for value in expected.values()), "a vanishing gradient proves nothing"
    return {name: float((ours.gradient[name] - value).norm() / value.norm()) for name, value in expected.items()}


@pytest.mark.parametrize(
    "optimizer", [server.sgd(), server.adam(0.05), server.grafted()], ids=["sgd", "adam", "grafted"]
)
@pytest.mark.parametrize("who", ["all", "some"])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
def test_weights_step_and_momentum(adjoint: AdjointKind, absent: Absent, who: str, optimizer: ServerOptimizer) -> None:
    """Also with a round in which nobody participates."""
    algorithm = Algorithm(server=optimizer, absent=absent, step_sizes=(0.7, 1.6, 1.2))
    for outer in ("every-round", "balanced", "final"):
        assert max(errors(who, algorithm, outer, adjoint).values()) <= TOLERANCE, outer


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
def test_sampled_clients(adjoint: AdjointKind, absent: Absent) -> None:
    algorithm = Algorithm(absent=absent)
    assert max(errors("all", algorithm, "every-round", adjoint, clients_per_round=2).values()) <= TOLERANCE


def test_momentum_changes_the_gradient() -> None:
    """Otherwise the tests above would hold for a rule without one."""
    rule, env = drawn_rule(), federation_of((5,), "all")
    federation = SimulatedFederation(env, dtype=torch.float64)
    noted: list[float] = []
    state: State = None
    for t in range(env.rounds):
        request = Algorithm().request(RUN, t, federation.initial_model(RUN))
        decision, state = rule(federation.train([request])[0], state)
        noted.append(decision.momentum)
    assert min(noted) > 0.01

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
from fedunfold.rules.families import Family
from fedunfold.rules.features import RoundFeatures
from fedunfold.rules.formula import FormulaRule
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import State
from fedunfold.rules.unfolded import PrivateRule, UnfoldedRule
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.unfolding.rule_gradient import rule_gradient
from tests.support.unrolled import Unrolled
from tests.unfolding.test_gradients import RUN, SIZES, TOLERANCE, federation_of, mlp

ABSENT: tuple[Absent, ...] = ("keep", "drop", "remember")


NOTED: dict[int, RoundFeatures[Tensor]] = {}


class Noting:
    """Notes what it read in each round."""

    def read(self, report: ClientUpdates, state: State) -> RoundFeatures[Tensor]:
        found: RoundFeatures[Tensor] = super().read(report, state)  # type: ignore[misc]
        NOTED[report.round] = found
        return found


class Network(Noting, UnfoldedRule): ...


class Private(Noting, PrivateRule): ...


class Formula(Noting, FormulaRule): ...


KINDS: dict[Family, type[ParametricRule]] = {"network": Network, "private-network": Private, "formula": Formula}


def drawn_rule(family: Family = "network") -> ParametricRule:
    """A rule far from FedAvg, whose momentum counts."""
    drawn = torch.Generator().manual_seed(6)
    params = {
        name: value + 0.5 * torch.randn(value.shape, generator=drawn, dtype=torch.float64)
        for name, value in KINDS[family].initial(6, 0).params.items()
    }
    return KINDS[family](params, horizon=3)


def errors(
    who: str,
    algorithm: Algorithm,
    outer: str,
    adjoint: AdjointKind,
    clients_per_round: int | None = None,
    family: Family = "network",
) -> dict[str, float]:
    """The relative error of each parameter's gradient."""
    env = federation_of((5,), who).replace(clients_per_round=clients_per_round)
    federation = SimulatedFederation(env, dtype=torch.float64)
    rule = drawn_rule(family)
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
    idle = idle_numbers(rule, algorithm)
    assert all(float(ours.gradient[name].abs()) < 1e-12 for name in idle)
    kept = {name: value for name, value in expected.items() if name not in idle}
    assert all(float(value.norm()) > 1e-9 for value in kept.values()), "a vanishing gradient proves nothing"
    return {name: float((ours.gradient[name] - value).norm() / value.norm()) for name, value in kept.items()}


def idle_numbers(rule: ParametricRule, algorithm: Algorithm) -> set[str]:
    """Those of a formula that decide nothing: exponents of what is alike for all clients in every round, as staleness
    is where absent clients do not count, and the trust in a server that is plain averaging."""
    if not isinstance(rule, FormulaRule):
        return set()
    apart = torch.stack([(found.of_clients - found.of_clients[0]).abs().amax(0) for found in NOTED.values()]).amax(0)
    idle = {f"weight.{name}" for name, most in zip(rule.client_features, apart, strict=True) if float(most) < 1e-12}
    return idle | ({"trust"} if isinstance(algorithm.server, server.sgd) else set())


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


@pytest.mark.parametrize("optimizer", [server.sgd(), server.adam(0.05)], ids=["sgd", "adam"])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
@pytest.mark.parametrize("family", ["private-network", "formula"])
def test_other_families(family: Family, adjoint: AdjointKind, absent: Absent, optimizer: ServerOptimizer) -> None:
    algorithm = Algorithm(server=optimizer, absent=absent, step_sizes=(0.7, 1.6, 1.2))
    found = errors("some", algorithm, "every-round", adjoint, family=family)
    assert max(found.values()) <= TOLERANCE, found


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

"""The gradient of weights and steps through rounds in which the model is scaled, against autograd through the run."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedunfold import server
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.params import ModelFactory
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer, RoundDecision, ServerOptimizer
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import decayed, momentum, prox, sgd
from fedunfold.unfolding.adjoint import AdjointKind, unroll_decisions
from tests.support.unrolled import Unrolled
from tests.unfolding.test_gradients import ABSENT, RUN, SIZES, TOLERANCE, federation_of, mlp

ROUNDS = 3
STEPS, MOMENTA, TRUSTS = (0.7, 1.6, 1.2), (0.2, 0.5, 0.3), (1.0, 0.6, 0.8)
SCALES = (0.6, 1.3, 0.8)


def errors(
    who: str,
    algorithm: Algorithm,
    outer: str,
    adjoint: AdjointKind,
    model: ModelFactory | None = None,
    scales: tuple[float, ...] = SCALES,
) -> dict[str, float]:
    """The relative error of the gradient in the logarithms of the weights, in the steps and in the momenta."""
    env = federation_of((5,), who)
    build = model or mlp(env)
    federation = SimulatedFederation(env, model=build, dtype=torch.float64)
    drawn = torch.randn(ROUNDS, len(SIZES), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits, steps, momenta = (
        value.requires_grad_()
        for value in (drawn, torch.tensor(STEPS, dtype=torch.float64), torch.tensor(MOMENTA, dtype=torch.float64))
    )
    weights = logits.softmax(1)

    def decide(report: ClientUpdates, state: Any) -> tuple[RoundDecision, Any]:
        t = report.round
        return RoundDecision(weights[t].detach(), STEPS[t], MOMENTA[t], TRUSTS[t], scales[t]), state

    start = federation.initial_model(RUN)
    (ours,) = unroll_decisions(
        federation, decide, ROUNDS, algorithm, OUTER_LOSSES.make(outer), adjoint, runs=[RUN], models=[start]
    )
    unrolled = Unrolled(env, build(), algorithm, outer, first_order=adjoint == "first_order")
    unrolled.squares, unrolled.momenta = False, momenta
    unrolled.trusts, unrolled.scales = (
        torch.tensor(TRUSTS, dtype=torch.float64),
        torch.tensor(SCALES, dtype=torch.float64),
    )
    loss = unrolled(weights, steps, start, RUN)
    if scales == SCALES:
        assert ours.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    to_weights, to_logits, to_steps, to_momenta = torch.autograd.grad(
        loss, (weights, logits, steps, momenta), retain_graph=True, materialize_grads=True
    )
    assert to_weights is not None
    (mine,) = torch.autograd.grad(weights, logits, ours.gradient)
    found: dict[str, float] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "weights": (mine, to_logits),
        "steps": (ours.step_gradient, to_steps),
        "momenta": (ours.momentum_gradient, to_momenta),
    }
    for name, (own, expected) in pairs.items():
        assert float(expected.norm()) > 1e-6, "a vanishing gradient proves nothing"
        found[name] = float((own - expected).norm() / expected.norm())
    return found


@pytest.mark.parametrize("optimizer", [server.sgd(), server.adam(0.05)], ids=["sgd", "adam"])
@pytest.mark.parametrize("who", ["all", "some"])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
def test_a_scaled_model(adjoint: AdjointKind, absent: Absent, who: str, optimizer: ServerOptimizer) -> None:
    """Also with a round in which nobody participates: under `drop` it scales nothing."""
    algorithm = Algorithm(server=optimizer, absent=absent)
    for outer in ("path", "balanced", "final", "every-round"):
        found = errors(who, algorithm, outer, adjoint)
        assert max(found.values()) <= TOLERANCE, (outer, found)


@pytest.mark.parametrize("local", [prox(0.5), momentum(0.6), decayed(sgd(), weight_decay=0.3)], ids=lambda o: o.name)
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
def test_other_local_optimisers(adjoint: AdjointKind, local: LocalOptimizer) -> None:
    found = errors("some", Algorithm(local, absent="remember"), "balanced", adjoint)
    assert max(found.values()) <= TOLERANCE, found


def test_the_scale_changes_the_gradient() -> None:
    """Otherwise the tests above would hold for one that leaves it out."""
    found = errors("all", Algorithm(), "balanced", "exact", scales=(1.0, 1.0, 1.0))
    assert min(found.values()) > 0.01

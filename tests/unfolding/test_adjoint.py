"""Several runs in step, forwards and backwards."""

import pytest
import torch

from fedunfold.aggregation.absent import Absent
from fedunfold.core.errors import DivergenceError
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation.schedule import RoundRng
from fedunfold.local.optimizers import nova
from fedunfold.server.optimizers import adam
from fedunfold.training.loop import Algorithm
from fedunfold.unfolding.adjoint import AdjointKind, unfold, unroll_and_grad
from fedunfold.unfolding.update_store import UpdateStorage
from tests.support.federations import OneByOne, SideBySide, simulated, tiny

RUNS = ["a", "b", "c"]
THETA = torch.tensor([[0.5, 0.6, 0.7], [0.9, 0.3, 0.4], [0.6, 0.6, 0.5], [0.2, 0.8, 0.6]], dtype=torch.float64)
ENV = tiny(participation_probability=0.4, rounds=4, seed=161)


def test_somebody_is_away_in_every_way() -> None:
    """How many of three clients are there in each round of each run."""
    there = [[int(RoundRng(161, run, t).present("abc", [0.4] * 3, None).sum()) for run in RUNS] for t in range(4)]
    assert there == [[1, 0, 3], [1, 1, 1], [0, 0, 0], [1, 1, 2]]


@pytest.mark.parametrize("tape", ["full", "disk"])
@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_runs_in_step_are_runs_apart(adjoint: AdjointKind, absent: Absent, tape: UpdateStorage) -> None:
    """Bit for bit where they are walked one after the other, and up to rounding where they share a walk."""
    algorithm, outer = Algorithm(nova(), adam(0.05), absent, step_sizes=(0.8, 1.2)), OuterLoss("balanced")
    apart = simulated(ENV)
    models = [apart.initial_model(run) for run in RUNS]
    expected = [
        unfold(apart, THETA, algorithm, outer, adjoint, run=run, model=model)
        for run, model in zip(RUNS, models, strict=True)
    ]
    assert len({found.loss for found in expected}) == len(RUNS)
    assert max(found.gradient.norm() for found in expected) > 1e-3
    side_by_side = SideBySide(ENV)
    for federation in (simulated(ENV), OneByOne(simulated(ENV)), side_by_side):
        together = unroll_and_grad(federation, THETA, algorithm, outer, adjoint, runs=RUNS, models=models, tape=tape)
        tolerance = 1e-12 if federation is side_by_side or tape == "disk" else 0.0
        for found, wanted in zip(together, expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, rel=tolerance, abs=0)
            for name in ("gradient", "step_gradient", "model"):
                torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=tolerance, atol=tolerance)
    assert side_by_side.trained == [3, 3, 3, 3]
    assert side_by_side.walked_back == ([3, 3, 2] if adjoint == "exact" else [])


def test_who_is_set_aside_is_so_in_its_own_run() -> None:
    """c overflows in its second step, if it is there."""
    sizes = {"a": 9, "b": 2, "c": 9}
    env = tiny(sizes, epochs=1, lr=1e19, participation_probability={"a": 0.0, "b": 1.0, "c": 0.5}, seed=1)
    federation = simulated(env, dtype=torch.float32)
    theta, there = THETA[:1], [RoundRng(1, run, 0).present("abc", [0.0, 1.0, 0.5], None)[2] for run in RUNS]
    assert 0 < sum(there) < len(RUNS)
    found = unroll_and_grad(
        *(federation, theta, Algorithm(absent_loss="skip"), OuterLoss("path"), "first_order"),
        runs=RUNS,
        models=[federation.initial_model(run) for run in RUNS],
    )
    assert [[entry.client for entry in of_run.rejected] for of_run in found] == [["c"] if c else [] for c in there]


def test_one_run_that_diverges_is_an_error() -> None:
    """Only b's first model is too large."""
    federation = simulated(tiny())
    models = [federation.initial_model(run) for run in RUNS]
    models[1] = models[1] * 1e300
    with pytest.raises(DivergenceError, match="round 0"):
        unroll_and_grad(federation, THETA, Algorithm(), OuterLoss(), "first_order", runs=RUNS, models=models)

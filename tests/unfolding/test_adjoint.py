"""Several runs batched, forward and backward."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, TrainRequest
from fedunfold.core.outcomes import OuterLossResult
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import nova
from fedunfold.server import adam
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.update_store import UpdateStorage
from tests.support.federations import RUN, BatchedRuns, ContractOnly, participation, simulated, tiny

RUNS = ["a", "b", "c"]
THETA = torch.tensor([[0.5, 0.6, 0.7], [0.9, 0.3, 0.4], [0.6, 0.6, 0.5], [0.2, 0.8, 0.6]], dtype=torch.float64)
ENV = tiny(participation_probability=0.4, rounds=4, seed=161)


def test_somebody_is_absent_in_every_way() -> None:
    """How many of three clients participate in each round of each run."""
    here = [[int(participation(ENV, run, t).participating.sum()) for run in RUNS] for t in range(4)]
    assert here == [[1, 0, 3], [1, 1, 1], [0, 0, 0], [1, 1, 2]]


@pytest.mark.parametrize("storage", ["full", "disk"])
@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_batched_runs_are_runs_apart(adjoint: AdjointKind, absent: Absent, storage: UpdateStorage) -> None:
    """Bit for bit where they are computed one after the other, and up to rounding where clients train together."""
    algorithm, outer = Algorithm(nova(), adam(0.05), absent, step_sizes=(0.8, 1.2)), OUTER_LOSSES.make("balanced")
    apart = simulated(ENV)
    models = [apart.initial_model(run) for run in RUNS]
    expected = [
        unroll_and_grad(apart, THETA, algorithm, outer, adjoint, runs=[run], models=[model])[0]
        for run, model in zip(RUNS, models, strict=True)
    ]
    assert len({found.loss for found in expected}) == len(RUNS)
    assert max(found.gradient.norm() for found in expected) > 1e-3
    batched = BatchedRuns(ENV)
    for federation in (simulated(ENV), ContractOnly(simulated(ENV)), batched):
        together = unroll_and_grad(
            *(federation, THETA, algorithm, outer, adjoint), runs=RUNS, models=models, storage=storage
        )
        tolerance = 1e-12 if federation is batched or storage == "disk" else 0.0
        for found, wanted in zip(together, expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, rel=tolerance, abs=0)
            for name in ("gradient", "step_gradient", "model"):
                torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=tolerance, atol=tolerance)
    assert batched.trained == [3, 3, 3, 3]
    assert batched.went_back == ([3, 3, 2] if adjoint == "exact" else [])


def test_who_is_rejected_is_so_in_its_own_run() -> None:
    """c overflows in its second step, if it participates."""
    sizes = {"a": 9, "b": 2, "c": 9}
    env = tiny(sizes, epochs=1, lr=1e19, participation_probability={"a": 0.0, "b": 1.0, "c": 0.5}, seed=1)
    federation = simulated(env, dtype=torch.float32)
    theta, here = THETA[:1], [participation(env, run, 0).participating[2] for run in RUNS]
    assert 0 < sum(here) < len(RUNS)
    found = unroll_and_grad(
        *(federation, theta, Algorithm(absent_loss="skip"), OUTER_LOSSES.make("path"), "first_order"),
        runs=RUNS,
        models=[federation.initial_model(run) for run in RUNS],
    )
    assert [[entry.client for entry in of_run.rejected] for of_run in found] == [["c"] if c else [] for c in here]


def test_one_run_that_diverges_is_an_error() -> None:
    """Only b's first model is too large."""
    federation = simulated(tiny())
    models = [federation.initial_model(run) for run in RUNS]
    models[1] = models[1] * 1e300
    with pytest.raises(DivergenceError, match="round 0"):
        unroll_and_grad(
            *(federation, THETA, Algorithm(), OUTER_LOSSES.make("path"), "first_order"), runs=RUNS, models=models
        )


class WatchedUpdates(SimulatedFederation):
    """Counts, when all rounds have been run, of how many of them the updates are still in memory."""

    alive = -1

    def __init__(self) -> None:
        super().__init__(tiny(), dtype=torch.float64)
        self.watched: list[weakref.ref[Tensor]] = []

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        reports = super().train(requests)
        self.watched += [weakref.ref(report.updates.rows) for report in reports]
        return reports

    def outer_loss(self, requests: Sequence[TrainRequest]) -> list[OuterLossResult]:
        gc.collect()
        self.alive = sum(rows() is not None for rows in self.watched)
        return super().outer_loss(requests)


@pytest.mark.parametrize(("storage", "alive"), [("full", 3), ("half", 0), ("disk", 0)])
@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_stored_updates_are_in_memory_only_where_they_are_stored_there(
    storage: UpdateStorage, alive: int, absent: Absent
) -> None:
    federation = WatchedUpdates()
    start, theta = federation.initial_model(RUN), torch.ones(3, 3, dtype=torch.float64)
    unroll_and_grad(
        *(federation, theta, Algorithm(absent=absent), OUTER_LOSSES.make("path"), "first_order"),
        runs=[RUN],
        models=[start],
        storage=storage,
    )
    assert len(federation.watched) == 3
    assert federation.alive == (0 if absent == "remember" else alive)

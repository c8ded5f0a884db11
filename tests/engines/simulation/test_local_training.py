"""Rounds of several runs: clients that walk side by side, there and back, and how many runs are worth it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.federation import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation import SimulatedFederation, engine
from fedunfold.engines.simulation.backends.cpu import CpuTrainer, is_built
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.local.optimizers import LocalOptimizer, accumulated, nova, prox, sgd
from tests.support.federations import SIZES, SideBySide, assert_same, convolution, simulated, tiny

MU = 0.5


@pytest.fixture
def walked_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lanes went back in every walk."""
    lanes: list[int] = []

    def noting(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(walk: CpuTrainer | TorchTrainer, start: Tensor, adjoint: Tensor) -> Tensor:
            lanes.append(len(adjoint))
            return backward(walk, start, adjoint)

        return noted

    for kind in (CpuTrainer, TorchTrainer):
        monkeypatch.setattr(kind, "backward", noting(kind.backward))
    return lanes


def test_walks_of_several_runs_in_one_launch() -> None:
    """What a GPU is given: the lanes of all runs, with some rounds that nobody attends."""
    env = tiny(participation_probability=0.15)
    federation = simulated(env)
    start = {name: federation.initial_model(name) for name in ("a", "b", "c")}
    requests = [
        TrainRequest(name, t, model, sgd(), outer=OuterLoss()) for name, model in start.items() for t in range(4)
    ]
    rounds = [federation._round(request) for request in requests]
    assert any(not len(round.there) for round in rounds)
    assert any(0 < len(round.there) < len(SIZES) for round in rounds)
    for request, found in zip(requests, federation._trained(rounds), strict=True):
        alone = federation.train(request)
        assert_same(found.updates, alone.updates)
        assert found.outer_loss == pytest.approx(alone.outer_loss)
        assert torch.equal(found.present, alone.present)


@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
@pytest.mark.parametrize("update", [sgd(), prox(MU), nova(), accumulated(prox(MU))], ids=lambda update: update.name)
def test_the_way_back_of_several_runs_in_one_walk(
    walked_back: list[int], update: LocalOptimizer, build: ModelFactory | None
) -> None:
    """What a GPU is given: the lanes of all rounds, of which some lack clients, and one has set one aside."""
    env = tiny(shape=(5,) if build is None else (1, 4, 4), participation_probability=0.5)
    apart, together = simulated(env, build), SideBySide(env, build)
    outer = OuterLoss("balanced")
    asked_for = [TrainRequest(run, 1, apart.initial_model(run), update, outer=outer) for run in "abcdefgh"]
    attended = {request.run: apart.train(request).present for request in asked_for}
    requests = [request for request in asked_for if attended[request.run].any()]
    presents = [attended[request.run] for request in requests]
    assert {int(present.sum()) for present in presents} == {1, 2, 3}
    next(present for present in presents if present.all())[1] = False
    torch.manual_seed(0)
    adjoints = [torch.randn(int(there.sum()), len(requests[0].model)).double() for there in presents]
    asked = (requests, presents, adjoints)
    expected = [apart.backprop(*of_run) for of_run in zip(*asked, strict=True)]
    for found in (apart.backprop_together(*asked), together.backprop_together(*asked)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, 1e-12)
    counts = [len(rows) for rows in adjoints]
    assert walked_back == [*counts, *counts, sum(counts)]


@pytest.mark.skipif(not is_built(), reason="the compiled walk was not built, or is for other processors")
def test_runs_whose_way_back_is_too_much_at_once_go_one_by_one(
    walked_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same walk, and not by a slower one that needs less memory."""
    env = tiny()
    apart, together = simulated(env), SideBySide(env)
    requests = [TrainRequest(run, 0, apart.initial_model(run), sgd(), outer=OuterLoss()) for run in "ab"]
    asked = (requests, [torch.ones(3, dtype=torch.bool)] * 2, [torch.ones(3, len(requests[0].model)).double()] * 2)
    expected = apart.backprop_together(*asked)
    monkeypatch.setattr(CpuTrainer, "supports_backward", lambda walk, budget: len(walk.schedule.order) <= 3)
    monkeypatch.delattr(TorchTrainer, "backward")
    for one, other in zip(together.backprop_together(*asked), expected, strict=True):
        assert_same(one, other, 1e-12)
    assert walked_back == [3, 3, 3, 3]


def test_runs_that_are_worth_going_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a CPU; on a GPU as many as fill it with the clients of a round, here three or two, or fill its memory."""
    assert simulated(tiny()).max_parallel_runs == 1
    kept = 3 * 3 * len(simulated(tiny()).initial_model("a")) * 8

    def within(budget: int) -> SimulatedFederation:
        return SimulatedFederation(tiny(), dtype=torch.float64, memory_budget=budget)

    for multiprocessors, federation, expected in (
        (132, simulated(tiny()), 44),
        (132, simulated(tiny(clients_per_round=2)), 66),
        (11, simulated(tiny()), 3),
        (2, simulated(tiny()), 1),
        (132, within(6 * kept - 1), 5),
        (132, within(1), 1),
        (132, simulated(tiny(), model=lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh())), 1),
    ):
        monkeypatch.setattr(federation, "_device", torch.device("cuda"))
        monkeypatch.setattr(engine, "multiprocessors", lambda device, count=multiprocessors: count)
        assert federation.max_parallel_runs == expected

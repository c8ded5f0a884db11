"""Rounds of several runs: clients that train together, forward and backward, and how many runs are worth it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation import SimulatedFederation, engine
from fedunfold.engines.simulation.backends.cpu import is_built
from fedunfold.engines.simulation.backends.cpu.local_training import CpuTrainer
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.local import accumulated, nova, prox, sgd
from fedunfold.unfolding.outer_loss import Balanced, Path
from tests.support.federations import SIZES, BatchedRuns, assert_same, convolution, simulated, tiny

MU = 0.5


@pytest.fixture
def backward_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots every backward pass had."""
    slots: list[int] = []

    def noting(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(trainer: CpuTrainer | TorchTrainer, start: Tensor, adjoint: Tensor) -> Tensor:
            slots.append(len(adjoint))
            return backward(trainer, start, adjoint)

        return noted

    for kind in (CpuTrainer, TorchTrainer):
        monkeypatch.setattr(kind, "backward", noting(kind.backward))
    return slots


def test_several_runs_train_in_one_launch() -> None:
    """What a GPU is given: the slots of all runs, with some rounds in which nobody participates."""
    env = tiny(participation_probability=0.15)
    federation = simulated(env)
    start = {name: federation.initial_model(name) for name in ("a", "b", "c")}
    requests = [TrainRequest(name, t, model, sgd(), outer=Path()) for name, model in start.items() for t in range(4)]
    rounds = [federation._context(request) for request in requests]
    assert any(not len(context.clients) for context in rounds)
    assert any(0 < len(context.clients) < len(SIZES) for context in rounds)
    for request, found in zip(requests, federation._train(rounds), strict=True):
        alone = federation.train([request])[0]
        assert_same(found.updates.rows, alone.updates.rows)
        assert found.outer.loss == pytest.approx(alone.outer.loss)
        assert torch.equal(found.participated, alone.participated)


@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
@pytest.mark.parametrize(
    "optimizer", [sgd(), prox(MU), nova(), accumulated(prox(MU))], ids=lambda optimizer: optimizer.name
)
def test_the_backward_pass_of_several_runs_in_one_launch(
    backward_slots: list[int], optimizer: LocalOptimizer, build: ModelFactory | None
) -> None:
    """What a GPU is given: the slots of all rounds, of which some lack clients, and one has rejected one."""
    env = tiny(shape=(5,) if build is None else (1, 4, 4), participation_probability=0.5)
    apart, together = simulated(env, build), BatchedRuns(env, build)
    outer = Balanced()
    asked_for = [TrainRequest(run, 1, apart.initial_model(run), optimizer, outer=outer) for run in "abcdefgh"]
    attended = {request.run: apart.train([request])[0].participated for request in asked_for}
    requests = [request for request in asked_for if attended[request.run].any()]
    presents = [attended[request.run] for request in requests]
    assert {int(present.sum()) for present in presents} == {1, 2, 3}
    next(present for present in presents if present.all())[1] = False
    torch.manual_seed(0)
    adjoints = [torch.randn(int(there.sum()), len(requests[0].model)).double() for there in presents]
    asked = (requests, presents, adjoints)
    expected = [apart.vjp([one], [who], [rows])[0] for one, who, rows in zip(*asked, strict=True)]
    for found in (apart.vjp(*asked), together.vjp(*asked)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, 1e-12)
    counts = [len(rows) for rows in adjoints]
    assert backward_slots == [*counts, *counts, sum(counts)]


@pytest.mark.skipif(not is_built(), reason="the compiled backend was not built, or is for other processors")
def test_runs_whose_backward_pass_is_too_large_at_once_are_taken_one_by_one(
    backward_slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same backend, and not by a slower one that needs less memory."""
    env = tiny()
    apart, together = simulated(env), BatchedRuns(env)
    requests = [TrainRequest(run, 0, apart.initial_model(run), sgd(), outer=Path()) for run in "ab"]
    asked = (requests, [torch.ones(3, dtype=torch.bool)] * 2, [torch.ones(3, len(requests[0].model)).double()] * 2)
    expected = apart.vjp(*asked)
    monkeypatch.setattr(CpuTrainer, "supports_backward", lambda trainer, budget: len(trainer.batches.order) <= 3)
    monkeypatch.delattr(TorchTrainer, "backward")
    for one, other in zip(together.vjp(*asked), expected, strict=True):
        assert_same(one, other, 1e-12)
    assert backward_slots == [3, 3, 3, 3]


def test_how_many_runs_are_worth_carrying_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr(federation, "device", torch.device("cuda"))
        monkeypatch.setattr(engine, "multiprocessors", lambda device, count=multiprocessors: count)
        assert federation.max_parallel_runs == expected

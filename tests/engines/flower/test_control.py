"""Control variates over Flower: they stay with the clients, in their contexts, and the run is the simulation's."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.engines.flower import WeightedStrategy, client_app, client_from_environment, federation_from_environment
from fedunfold.engines.flower.control import LOST, RECORD, with_control
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import CONTROL, OWN_CONTROL, SHARED_CONTROL, TrainInstruction
from fedunfold.local import feddyn, scaffold
from fedunfold.rules import uniform
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from tests.engines.flower.test_strategy import changed
from tests.support.federations import RUN, assert_same, mlp, simulated, tiny
from tests.support.grid import LocalGrid, Spoil
from tests.training.test_control_variates import full_batches, softmax_regression, transcribed

BOTH: list[ControlledOptimizer] = [scaffold(), feddyn(0.4)]
both = pytest.mark.parametrize("local", BOTH, ids=lambda local: local.name)
B = 101  # b's node


def grid_of(env: Any, spoil: Spoil | None = None) -> LocalGrid:
    open_client = partial(client_from_environment, env, dtype=torch.float64, model=softmax_regression)
    nodes = {100 + k: {"client-id": key} for k, key in enumerate(env.load().keys)}
    return LocalGrid(client_app(open_client), nodes, spoil)


def run(
    env: Any, grid: LocalGrid, local: ControlledOptimizer, on_round: Any = None, timeout: float = 60.0
) -> tuple[RunResult, Tensor]:
    """A run over the grid, and where it began."""
    remote = federation_from_environment(grid, env, model=softmax_regression, dtype=torch.float64, timeout=timeout)
    algorithm = Algorithm(local, absent="drop")
    (result,) = run_rounds(remote, uniform(), env.rounds, [RUN], algorithm=algorithm, on_round=on_round)
    return result, remote.initial_model(RUN)


@both
def test_a_run_is_the_simulations_and_every_client_keeps_its_own(local: ControlledOptimizer) -> None:
    env = full_batches()
    grid = grid_of(env)
    found, _ = run(env, grid, local)
    simulation = simulated(env, softmax_regression)
    (expected,) = run_rounds(simulation, uniform(), env.rounds, [RUN], algorithm=Algorithm(local, absent="drop"))
    assert torch.equal(found.participated, expected.participated)
    assert not found.participated.all()
    assert_same(found.model, expected.model)
    for k, state in grid.states.items():
        came = torch.nonzero(found.participated[:, k - 100]).flatten().tolist()
        assert list(state) == ([f"{RECORD}:{RUN}"] if came else [])
        assert [f"{RUN}:{t}" for t in came[-2:]] == list(state.array_records.get(f"{RECORD}:{RUN}", {}))
    arrays = [array for message in grid.sent for array in next(iter(message.content.array_records.values()), {})]
    assert (SHARED_CONTROL in arrays) == (local.name == "scaffold"), "FedDyn's clients do not need h"
    assert OWN_CONTROL not in arrays


@both
@pytest.mark.parametrize("how", ["lost", "rejected"])
def test_one_whose_reply_is_not_used_goes_on_from_the_round_before(local: ControlledOptimizer, how: str) -> None:
    env = full_batches(participation_probability=1.0, rounds=4)
    trained = 0

    def spoil(reply: Message, node: int) -> Message | None:
        nonlocal trained
        if reply.metadata.message_type == "train" and node == B:
            trained += 1
            if trained == 2:
                reply.content = changed(reply, updates=np.full(15, np.nan))
                return None if how == "lost" else reply
        return reply

    found, start = run(env, grid_of(env, spoil), local, timeout=2.0)
    assert found.participated[:, 1].tolist() == [True, False, True, True]
    assert_same(found.model, transcribed(env, local, start, found.participated)[0])


@both
def test_one_that_has_lost_it_is_named_and_goes_on_from_zero(
    local: ControlledOptimizer, caplog: pytest.LogCaptureFixture
) -> None:
    """b's node is new in round 2, with an empty context."""
    env = full_batches(participation_probability=1.0, rounds=4)
    grid = grid_of(env)

    def restart(t: int, _: object) -> None:
        if t == 1:
            grid.states[B] = RecordDict()

    with caplog.at_level(logging.WARNING, "fedunfold"):
        found, start = run(env, grid, local, restart)
    lost = "client b took part before and has lost its control variate since; it began again from zero"
    assert caplog.messages == [f"round 2: {lost}"]
    assert_same(found.model, transcribed(env, local, start, found.participated, forgets={(2, 1)})[0])
    whole, _ = run(env, grid_of(env), local)
    assert not torch.allclose(found.model, whole.model, atol=1e-4)


@both
def test_a_second_run_of_the_same_name_begins_from_zero(local: ControlledOptimizer) -> None:
    env = full_batches()
    grid = grid_of(env)
    first, second = (run(env, grid, local)[0] for _ in range(2))
    assert torch.equal(first.model, second.model)


# --- single messages ---------------------------------------------------------------------------------------


def client() -> tuple[LocalClient, dict[str, Tensor]]:
    env = tiny({"a": 7})
    data = env.load()
    model = simulated(env).initial_model(RUN)
    return LocalClient("a", *data.client(0), data.task, mlp(env), torch.float64), {
        "model": model,
        SHARED_CONTROL: torch.zeros_like(model),
    }


def instruction(t: int, before: int | None = -1, **more: Any) -> TrainInstruction:
    common: dict[str, Any] = {"seed": 0, "lr": 0.3, "batch_size": 3, "epochs": 1, "optimizer": scaffold()}
    return TrainInstruction(run=RUN, round=t, control_round=before, **common | more)


def test_the_same_message_twice_has_the_same_answer() -> None:
    (one, arrays), state = client(), RecordDict()
    train = partial(with_control, one.train, arrays=arrays, state=state)
    first = train(instruction=instruction(0))
    for before, t in ((0, 1), (1, 3)):
        answers = [train(instruction=instruction(t, before)) for _ in range(2)]
        assert torch.equal(answers[0].arrays["updates"], answers[1].arrays["updates"])
        assert not torch.equal(answers[0].arrays["updates"], first.arrays["updates"])
        assert set(answers[0].arrays) == {"updates"} and answers[0].metrics[LOST] == 0
    assert CONTROL not in first.arrays and first.metrics[LOST] == 0
    assert train(instruction=instruction(4, 0)).metrics[LOST] == 1  # of which nothing is left


def test_without_control_variates_nothing_is_stored() -> None:
    (one, arrays), state = client(), RecordDict()
    plain = instruction(0, None, optimizer={"name": "sgd"})
    reply = with_control(one.train, plain, {"model": arrays["model"]}, state)
    assert not state and LOST not in reply.metrics


def test_the_adjoint_of_a_round_whose_control_variate_is_lost_is_refused() -> None:
    one, arrays = client()
    arrays["adjoint"] = torch.ones_like(arrays["model"])
    with pytest.raises(InputError, match=r"round 3: the control variate that the adjoint needs is lost, .* round 1; "):
        with_control(one.vjp, instruction(3, 1), arrays, RecordDict())


# --- learning ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_weights_are_learned_as_in_the_simulation_and_states_do_not_pile_up(
    local: ControlledOptimizer, adjoint: Any
) -> None:
    env = full_batches(rounds=3)
    grid = grid_of(env)
    remote = federation_from_environment(grid, env, model=softmax_regression, dtype=torch.float64)
    learning = Learning(iterations=3, lr=0.1, adjoint=adjoint)
    federations = simulated(env, softmax_regression), remote
    here, there = (learn(f, 3, algorithm=Algorithm(local, absent="drop"), learning=learning) for f in federations)
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-6, atol=0)  # steps are over the root of squares
    for state in grid.states.values():
        assert list(state) == [RECORD]
        assert len(state.array_records[RECORD]) <= (3 if adjoint == "exact" else 2)


# --- where they are refused --------------------------------------------------------------------------------


@both
def test_secure_sums_are_refused(local: ControlledOptimizer) -> None:
    env = full_batches()
    grid = grid_of(env)
    for node in grid.nodes.values():
        node["secure-aggregation"] = True
    remote = federation_from_environment(
        grid, env, model=softmax_regression, dtype=torch.float64, secure_aggregation=True
    )
    with pytest.raises(InputError, match=f"one sum of a round's updates, and {local.name} needs a second"):
        run_rounds(remote, uniform(), 1, algorithm=Algorithm(local))


@both
def test_a_strategy_over_an_apps_own_clients_refuses_them(local: ControlledOptimizer) -> None:
    env = tiny()
    learned = learn(simulated(env), 3, algorithm=Algorithm(local), learning=Learning(iterations=1))
    with pytest.raises(InputError, match=f"the rule is for {local.name}, by which no client of an app trains"):
        WeightedStrategy(learned)
    assert WeightedStrategy(replace(learned, settings={})).algorithm.local.name == "sgd"

"""Runs under a rule that reads data of the server: resumed, over several runs at once, and beside learned tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.rules import fedlaw
from fedunfold.training.loop import run_rounds
from tests.support.federations import BatchedRuns, ContractOnly, simulated, tiny

SERVER = np.random.default_rng(8).normal(size=(11, 5)), np.arange(11) % 3
LAW = fedlaw(epochs=3, lr=0.1, batch_size=4)


class Killed(Exception):
    pass


def with_server(server: Any = SERVER, **settings: Any) -> Environment:
    """`tiny` with data of the server."""
    plain = tiny(**settings)
    data = plain.load()
    rows = {key: (x.numpy(), y.numpy()) for key, (x, y) in zip(data.keys, map(data.client, range(3)), strict=True)}
    epochs = {client.key: client.epochs for client in plain.clients}
    probabilities = {client.key: client.participation_probability for client in plain.clients}
    made = Environment.from_arrays(
        rows,
        (data.x_test.numpy(), data.y_test.numpy()),
        server_data=server,
        epochs=epochs,
        participation_probability=probabilities,
        **plain.model_dump(include={"rounds", "batch_size", "lr", "seed"}),
    )
    return made.replace(model=plain.model)


@pytest.mark.parametrize("absent", ["drop", "remember"])
@pytest.mark.parametrize("killed_after", [0, 1])
def test_a_run_is_resumed_byte_for_byte(tmp_path: Path, killed_after: int, absent: Absent) -> None:
    env, algorithm = with_server(participation_probability=0.6, seed=3), Algorithm(absent=absent)

    def kill(t: int, _: Sequence[Evaluation]) -> None:
        if t == killed_after:
            raise Killed

    def run(file: Path, **more: Any) -> fu.RunResult:
        return run_rounds(simulated(env), LAW, 3, algorithm=algorithm, checkpoint=file, **more)[0]

    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    expected = run(whole)
    with pytest.raises(Killed):
        run(parts, on_round=kill)
    found = run(parts)
    assert torch.equal(found.model, expected.model)
    assert torch.equal(found.weights, expected.weights)
    assert found.scores == expected.scores
    assert parts.read_bytes() == whole.read_bytes()


def test_other_data_of_the_server_are_another_federation(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    fu.run(with_server(), LAW, checkpoint=file)
    with pytest.raises(InputError, match=r"run\.safetensors"):
        fu.run(with_server((SERVER[0], np.zeros(11, dtype=int))), LAW, checkpoint=file)


def test_runs_together_are_runs_apart() -> None:
    env = with_server(participation_probability=0.7, seed=2)
    apart = [run_rounds(simulated(env), LAW, 3, [run])[0] for run in ("trial-0", "trial-1")]
    for federation in (simulated(env), ContractOnly(simulated(env)), BatchedRuns(env)):
        together = run_rounds(federation, LAW, 3, ["trial-0", "trial-1"])
        for found, expected in zip(together, apart, strict=True):
            torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found.model, expected.model, rtol=1e-9, atol=1e-12)
    assert not torch.equal(apart[0].weights, apart[1].weights)


def test_learned_tables_do_not_see_the_servers_data() -> None:
    learning = fu.Learning(iterations=3, lr=0.1)
    plain, beside = (fu.learn_weights(env, learning=learning, dtype=torch.float64) for env in (tiny(), with_server()))
    assert torch.equal(plain.weights, beside.weights)
    assert torch.equal(plain.losses, beside.losses)
    assert not torch.equal(plain.history[0], plain.history[-1])


def test_other_methods_do_not_see_them_either() -> None:
    for name in ("fedavg", "dr-fedprox"):
        assert torch.equal(fu.run(tiny(), name).model, fu.run(with_server(), name).model)


def test_a_comparison_with_it() -> None:
    found = fu.compare(with_server(), ["fedavg", "fedlaw", "law-fedprox", LAW], trials=2)
    assert [entry.name for entry in found.methods] == ["fedavg", "fedlaw", "law-fedprox", LAW.name]

"""Runs by SCAFFOLD and FedDyn: by hand, against NumPy, to the optimum they are for, and from a checkpoint."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from fedunfold.aggregation import krum, median, trimmed_mean
from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, TrainRequest
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import LocalOptimizer
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import feddyn, prox, scaffold, sgd
from fedunfold.rules import WeightingRule, size, uniform
from fedunfold.tasks import regression
from fedunfold.training.loop import run_rounds
from tests.support.control_variates import FullBatches
from tests.support.federations import RUN, BatchedRuns, assert_same, mlp, run_one, simulated, tiny

BOTH: list[ControlledOptimizer] = [scaffold(), feddyn(0.4)]
both = pytest.mark.parametrize("local", BOTH, ids=lambda local: local.name)


def run(
    env: Environment, algorithm: Algorithm, model: Any = None, file: Path | None = None, **more: Any
) -> tuple[RunResult, dict[str, Tensor]]:
    """A run with equal weights, and what its checkpoint holds."""
    federation = simulated(env, model)
    (result,) = run_rounds(federation, uniform(), env.rounds, [RUN], algorithm=algorithm, checkpoint=file, **more)
    saved = {} if file is None else load(file.read_bytes())
    return result, {name.removeprefix("0."): tensor for name, tensor in saved.items()}


# --- two clients on a line ---------------------------------------------------------------------------------


def from_zero() -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


@pytest.mark.parametrize(
    ("local", "models", "own", "shared"),
    [
        # Gradients 2 (w − 2) in one step and 2 (w − 8) in two, η = ¼. SCAFFOLD: to 1 and 6 by means of −4 and −12;
        # then from 3.5 with v = −4 and 4 to 3.75 and 5.375, by 3 and −7.75.
        (scaffold(), [3.5, 4.5625], [[-4, -12], [3, -7.75]], [-8, -2.375]),
        # FedDyn, α = 1: to 1 and 5, so h = −3 and w = 3 + 3; then with v = 1 and 5 to 3.75 and 5.6875.
        (feddyn(1.0), [6.0, 6.4375], [[-1, -5], [1.25, -4.6875]], [-3, -1.71875]),
    ],
    ids=["scaffold", "feddyn"],
)
def test_two_rounds_of_two_clients_by_hand(
    tmp_path: Path, local: ControlledOptimizer, models: list[float], own: list[list[float]], shared: list[float]
) -> None:
    clients = {"a": ([[1.0]], [[2.0]]), "b": ([[1.0]], [[8.0]])}
    for t in range(2):
        settings: dict[str, Any] = {"rounds": t + 1, "batch_size": 1, "lr": 0.25, "epochs": {"a": 1, "b": 2}}
        env = Environment.from_arrays(clients, ([[1.0]], [[5.0]]), task=regression(), **settings)
        result, saved = run(env, Algorithm(local), from_zero, tmp_path / f"{t}.safetensors")
        assert result.model.tolist() == [models[t]]
        assert [saved[f"control-{k}"].item() for k in range(2)] == own[t]
        assert saved["control"].item() == shared[t]


# --- NumPy -------------------------------------------------------------------------------------------------

SIZES, STEPS = {"a": 7, "b": 4, "c": 9, "d": 5}, {"a": 1, "b": 3, "c": 2, "d": 4}


def softmax_regression() -> nn.Module:
    return nn.Linear(5, 3, bias=False)


def full_batches(**settings: Any) -> Environment:
    chosen: dict[str, Any] = {"rounds": 6, "participation_probability": 0.6, "seed": 5, "batch_size": 9}
    return tiny(SIZES, epochs=STEPS, **chosen | settings)


def transcribed(
    env: Environment, local: ControlledOptimizer, start: Tensor, took_part: Tensor, forgets: Any = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """w, s and all s_k, as vectors."""
    data = env.load()
    clients = FullBatches([data.client(k) for k in range(len(SIZES))], 3, list(STEPS.values()), env.lr, forgets)
    rounds = clients.scaffold if local.name == "scaffold" else partial(clients.feddyn, alpha=local.alpha)  # type: ignore[attr-defined]
    w, shared, own = rounds(start.numpy().reshape(3, 5), took_part.tolist())
    return (
        torch.from_numpy(w.ravel()),
        torch.from_numpy(shared.ravel()),
        torch.from_numpy(np.stack(own).reshape(4, -1)),
    )


@both
@pytest.mark.parametrize("settings", [{}, {"clients_per_round": 2}, {"participation_probability": 1.0}], ids=str)
def test_it_is_the_papers_algorithm(tmp_path: Path, local: ControlledOptimizer, settings: dict[str, Any]) -> None:
    """Some clients come in some rounds; the weights are equal ones over whoever does."""
    env = full_batches(**settings)
    file = tmp_path / "run.safetensors"
    result, saved = run(env, Algorithm(local, absent="drop"), softmax_regression, file)
    assert result.participated.all() == (settings == {"participation_probability": 1.0})
    start = simulated(env, softmax_regression).initial_model(RUN)
    model, shared, own = transcribed(env, local, start, result.participated)
    assert_same(result.model, model)
    assert_same(saved["control"], shared)
    for k in range(len(SIZES)):
        seen = bool(result.participated[:, k].any())
        assert (f"control-{k}" in saved) == seen
        if seen:
            assert_same(saved[f"control-{k}"], own[k])
    assert_same(saved["control"], own.mean(0))


@both
def test_a_rejected_client_keeps_its_own(tmp_path: Path, local: ControlledOptimizer) -> None:
    """b trains in every round, and in two of them nothing of it is used: it is as one that was absent."""
    env = full_batches(participation_probability=1.0)

    class Rejecting(SimulatedFederation):
        def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
            everybody, others = torch.ones(4, dtype=torch.bool), torch.tensor([True, False, True, True])
            return [
                report.accept(others if report.round in (1, 4) else everybody) for report in super().train(requests)
            ]

    federation, file = Rejecting(env, model=softmax_regression, dtype=torch.float64), tmp_path / "run.safetensors"
    algorithm = Algorithm(local, absent="drop")
    (result,) = run_rounds(federation, uniform(), env.rounds, [RUN], algorithm=algorithm, checkpoint=file)
    assert result.participated[:, 1].tolist() == [True, False, True, True, False, True]
    model, shared, own = transcribed(env, local, federation.initial_model(RUN), result.participated)
    saved = load(file.read_bytes())
    assert_same(result.model, model)
    assert_same(saved["0.control"], shared)
    assert_same(saved["0.control-1"], own[1])


# --- what they converge to ---------------------------------------------------------------------------------


def unlike_clients(rounds: int) -> tuple[Environment, Tensor]:
    """Linear regressions with other features and another truth at every client, and the optimum of their plain mean."""
    draw = np.random.default_rng(3)
    clients = {}
    for k, n in enumerate((12, 6, 9, 15)):
        x = draw.normal(size=(n, 3)) * draw.uniform(0.3, 1.5, 3)
        rows, y = (values.astype(np.float32).astype(np.float64) for values in (x, x @ draw.normal(size=(3, 1)) * 2))
        clients[f"client-{k}"] = rows, y
    squares = sum(x.T @ x / len(x) for x, _ in clients.values())
    optimum = np.linalg.solve(squares, sum(x.T @ y / len(x) for x, y in clients.values()))
    settings: dict[str, Any] = {"rounds": rounds, "batch_size": 20, "lr": 0.1, "epochs": 8}
    env = Environment.from_arrays(clients, clients["client-0"], task=regression(), **settings)
    return env, torch.from_numpy(optimum.ravel())


def linear() -> nn.Module:
    return nn.Linear(3, 1, bias=False)


def distance(local: LocalOptimizer, rule: WeightingRule) -> float:
    """Of the model after 120 rounds to the optimum."""
    env, optimum = unlike_clients(rounds=120)
    result = run_one(simulated(env, linear), rule, env.rounds, algorithm=Algorithm(local))
    return float((result.model - optimum).norm())


@pytest.mark.parametrize("rule", [uniform(), size()], ids=lambda rule: rule.name)
def test_they_rest_at_the_optimum_of_all_clients_and_fedavg_does_not(rule: WeightingRule) -> None:
    """At that of the plain mean of the clients' losses, whatever the weights."""
    assert distance(feddyn(2.0), rule) < 1e-12
    assert distance(scaffold(), rule) < 1e-12
    assert distance(sgd(), rule) > 0.5


# --- special cases -----------------------------------------------------------------------------------------


def test_scaffold_with_one_client_is_sgd() -> None:
    """c = c_k to the bit, so the corrections are 0; what is left is the order of products in a step."""
    env = tiny({"a": 9}, rounds=4)
    found, expected = (run(env, Algorithm(local))[0].model for local in (scaffold(), sgd()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("local", "alike"), [(scaffold(), sgd()), (feddyn(0.4), prox(0.4))], ids=["scaffold", "feddyn"]
)
def test_in_the_first_round_nobody_is_corrected(local: LocalOptimizer, alike: LocalOptimizer) -> None:
    federation, none = simulated(tiny()), simulated(tiny())
    start = federation.initial_model(RUN)
    under = federation.train([Algorithm(local).request(RUN, 0, start)])[0]
    plain = none.train([Algorithm(alike).request(RUN, 0, start)])[0]
    assert_same(under.updates.rows, plain.updates.rows)
    assert plain.metrics.controls is None


@both
def test_a_round_without_updates_changes_nothing(local: ControlledOptimizer) -> None:
    env = tiny(participation_probability=0.3, seed=2, rounds=8)
    models: list[Tensor] = []

    class Noting(SimulatedFederation):
        def evaluate(self, given: Sequence[Tensor]) -> list[Evaluation]:
            models.extend(given)
            return super().evaluate(given)

    for absent in ("keep", "drop"):
        models.clear()
        federation = Noting(env, dtype=torch.float64)
        result = run_one(federation, uniform(), env.rounds, algorithm=Algorithm(local, absent=absent))
        empty = [t for t, anybody in enumerate(result.participated.any(1).tolist()) if not anybody and t]
        assert empty
        for t in empty:
            assert torch.equal(models[t], models[t - 1])


@both
def test_listing_the_clients_otherwise_only_reorders(local: ControlledOptimizer) -> None:
    settings: dict[str, Any] = {"participation_probability": 0.6, "seed": 3, "rounds": 4}
    names = {"a": 7, "b": 4, "c": 9}
    one, other = tiny(names, **settings), tiny(dict(reversed(names.items())), **settings)
    found, again = (run(env, Algorithm(local, absent="drop"))[0] for env in (one, other))
    assert not found.participated.all()
    assert torch.equal(again.participated.flip(1), found.participated)
    assert_same(again.model, found.model)


@both
def test_batched_runs_are_runs_apart(local: ControlledOptimizer) -> None:
    env = tiny(participation_probability=0.4, seed=3, rounds=8)
    names, algorithm = ["trial-0", "trial-1"], Algorithm(local)
    together = run_rounds(BatchedRuns(env), uniform(), 8, names, algorithm=algorithm)
    apart = [run_one(simulated(env), uniform(), 8, run=name, algorithm=algorithm) for name in names]
    somebody = torch.stack([found.participated.any(1) for found in together])
    assert (somebody[0] != somebody[1]).any()  # also where one of the runs has nobody in a round
    for found, expected in zip(together, apart, strict=True):
        assert_same(found.model, expected.model)


@both
def test_any_module_trains_as_the_stack_does(local: ControlledOptimizer) -> None:
    env = tiny(rounds=4)
    build = mlp(env)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    assert [simulated(env, model).kernel for model in (None, Hidden)] == ["MLPKernel", "ModuleKernel"]
    stack, module = (run(env, Algorithm(local), model)[0].model for model in (None, Hidden))
    assert_same(module, stack)


@both
def test_running_statistics_have_no_control_variates(tmp_path: Path, local: ControlledOptimizer) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    env = tiny({"a": 8, "b": 6, "c": 12}, batch_size=4, rounds=3)
    result, saved = run(env, Algorithm(local), build, tmp_path / "run.safetensors")
    layout = simulated(env, build).layout
    assert layout.num_buffer_entries == 8
    for name in ("control", "control-0", "control-2"):
        assert not layout.buffers(saved[name]).any()
        assert layout.params(saved[name]).any()
    start = simulated(env, build).initial_model(RUN)
    assert not torch.equal(layout.buffers(result.model), layout.buffers(start))


# --- checkpoints -------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@both
@pytest.mark.parametrize("killed_after", [0, 2])
def test_a_run_is_resumed_to_the_same_bytes(tmp_path: Path, local: ControlledOptimizer, killed_after: int) -> None:
    env = tiny(participation_probability=0.6, seed=3, rounds=5)
    algorithm = Algorithm(local, absent="drop")

    def kill(t: int, _: object) -> None:
        if t == killed_after:
            raise Killed

    whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
    expected, _ = run(env, algorithm, file=whole)
    with pytest.raises(Killed):
        run(env, algorithm, file=resumed, on_round=kill)
    found, saved = run(env, algorithm, file=resumed)
    assert torch.equal(found.model, expected.model)
    assert resumed.read_bytes() == whole.read_bytes()
    last = [int(torch.nonzero(column)[-1]) for column in expected.participated.T]
    assert saved["control_rounds"].tolist() == [[0, 1, 2], last]


# --- what does not go together -----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("aggregator", [median(), trimmed_mean(), krum(1)], ids=lambda part: part.name)
def test_robust_aggregators_are_refused(local: ControlledOptimizer, aggregator: Any) -> None:
    with pytest.raises(
        InputError, match=rf"{local.name} keeps a plain mean .*, which {aggregator.name} does not guard"
    ):
        Algorithm(local, aggregator=aggregator)


@both
def test_asynchronous_rounds_are_refused(local: ControlledOptimizer) -> None:
    with pytest.raises(InputError, match=f"{local.name} corrects clients by what the others sent in the round before"):
        Algorithm(local, schedule="asynchronous")

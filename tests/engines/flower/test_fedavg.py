"""With sampled clients, size weights are Flower's own FedAvg on the same cohort: as a strategy, and in both engines."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.parts import LocalOptimizer, RoundDecision
from fedunfold.engines.flower import (
    ClientDescription,
    WeightedStrategy,
    client_app,
    client_from_environment,
    federation_from_environment,
    registration_mod,
)
from fedunfold.local import nova, sgd
from fedunfold.rules import rule, size
from fedunfold.server import adam, exp
from fedunfold.server import sgd as server_sgd
from fedunfold.training.loop import run_rounds
from tests.support.federations import RUN, Plain, mlp, participation, simulated, tiny
from tests.support.grid import LocalGrid

SIZES = {"a": 7, "b": 4, "c": 19, "d": 5, "e": 8, "f": 11}
ROUNDS = 3
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def sampled(**settings: Any) -> Environment:
    return tiny(SIZES, clients_per_round=3, rounds=ROUNDS, **settings)


def cohort(env: Environment, t: int) -> list[int]:
    return np.flatnonzero(participation(env, RUN, t).cohort).tolist()


def arrays_of(env: Environment, model: Tensor) -> ArrayRecord:
    """A model under the names of its parameters."""
    layout = simulated(env, dtype=torch.float32).layout
    pieces = torch.split(model, [shape.numel() for shape in layout.shapes])
    return ArrayRecord(
        {
            name: Array(piece.reshape(shape).numpy())
            for name, shape, piece in zip(layout.names, layout.shapes, pieces, strict=True)
        }
    )


def model_of(arrays: ArrayRecord) -> Tensor:
    return torch.cat([torch.from_numpy(array.numpy().copy()).flatten() for array in arrays.values()])


def ordinary_app(env: Environment, *, registers: bool = False) -> ClientApp:
    """Clients as any Flower app has them: they load the model, train it in plain PyTorch, and send it back."""
    plain, keys = Plain(env, mlp(env), torch.float32), env.load().keys

    def describe(context: Context) -> ClientDescription:
        k = int(context.node_config["k"])
        return ClientDescription(keys[k], tuple(env.load().label_counts[k].tolist()))

    app = ClientApp(mods=[registration_mod(describe)] if registers else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        k, server_round = int(context.node_config["k"]), message.content.config_records["config"]["server-round"]
        assert isinstance(server_round, int)
        trained = plain.train(model_of(message.content.array_records["arrays"]), server_round - 1, k).model
        metrics = MetricRecord({"num-examples": SIZES[keys[k]]})
        return Message(RecordDict({"arrays": arrays_of(env, trained), "metrics": metrics}), reply_to=message)

    return app


def by_strategy(env: Environment, strategy: FedAvg, monkeypatch: pytest.MonkeyPatch, **app: Any) -> list[Tensor]:
    """The model after every round, where a strategy samples the environment's cohorts."""
    grid = LocalGrid(ordinary_app(env, **app), {100 + k: {"k": k} for k in range(len(SIZES))})
    found: list[Tensor] = []

    def sample_nodes(*_: Any) -> tuple[list[int], list[int]]:
        return [100 + k for k in cohort(env, len(found) - 1)], list(grid.nodes)

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        found.append(model_of(arrays))
        return MetricRecord()

    monkeypatch.setattr("flwr.serverapp.strategy.fedavg.sample_nodes", sample_nodes)
    start = arrays_of(env, simulated(env, dtype=torch.float32).initial_model(RUN))
    strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=note)
    return found[1:]


@pytest.mark.parametrize("registers", [False, True])
def test_the_strategy(registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env = sampled()
    theirs = by_strategy(env, FedAvg(fraction_evaluate=0.0), monkeypatch)
    strategy = WeightedStrategy(size(), fraction_evaluate=0.0)
    ours = by_strategy(env, strategy, monkeypatch, registers=registers)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for t, weights in enumerate(strategy.weights):
        sizes = {list(SIZES)[k]: list(SIZES.values())[k] for k in cohort(env, t)}
        names = list(sizes) if registers else [f"node:{100 + k}" for k in cohort(env, t)]
        assert weights == pytest.approx(
            dict(zip(names, (n / sum(sizes.values()) for n in sizes.values()), strict=True))
        )


@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_both_engines(absent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = sampled()
    theirs = by_strategy(env, FedAvg(fraction_evaluate=0.0), monkeypatch)
    app = client_app(lambda context: client_from_environment(env, context))
    grid = LocalGrid(app, {k: {"partition-id": k} for k in range(len(SIZES))})
    for federation in (simulated(env, dtype=torch.float32), federation_from_environment(grid, env)):
        for t, expected in enumerate(theirs):
            (found,) = run_rounds(federation, size(), t + 1, algorithm=Algorithm(absent=absent))
            assert found.participated[t].nonzero().flatten().tolist() == cohort(env, t)
            torch.testing.assert_close(found.model, expected, **CLOSE)


@pytest.mark.parametrize("local", [sgd(), nova()], ids=lambda local: local.name)
def test_the_step_of_a_sampled_round_is_not_smaller(local: LocalOptimizer) -> None:
    """Where all clients hold the same data, sampling some of them changes nothing."""
    x, y = np.random.default_rng(0).normal(size=(6, 5)), np.arange(6) % 3
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 6, "lr": 0.3, "classes": 3}
    models = []
    for clients_per_round in (None, 2):
        clients = dict.fromkeys("abcdef", (x, y))
        env = Environment.from_arrays(clients, (x, y), clients_per_round=clients_per_round, **settings)
        models += [result.model for result in run_rounds(simulated(env), size(), 2, algorithm=Algorithm(local))]
    torch.testing.assert_close(models[1], models[0])


@pytest.mark.parametrize("server", [adam(lr=0.05), server_sgd(), exp()], ids=lambda server: server.name)
def test_a_rule_that_decides_on_step_and_momentum(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """u = s Σ Θ Δ + β u of the round before, under a server optimiser: the numbers are the simulation's."""

    @rule()
    def deciding(report: Any, state: Any) -> Any:
        weights = report.num_examples.double() / report.num_examples.sum()
        return RoundDecision(weights, step=0.7 + 0.2 * report.round, momentum=0.5), state

    env = sampled()
    strategy = WeightedStrategy(deciding, server=server, fraction_evaluate=0.0)
    ours = by_strategy(env, strategy, monkeypatch)
    for t, found in enumerate(ours):
        algorithm = Algorithm(absent="drop", server=server)
        (expected,) = run_rounds(simulated(env, dtype=torch.float32), deciding, t + 1, algorithm=algorithm)
        torch.testing.assert_close(found, expected.model, rtol=1e-5, atol=1e-5)

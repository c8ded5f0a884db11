"""FedPer and FedBN: against plain PyTorch, and that nothing of a client's own layers reaches the server."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedunfold as fu
from fedunfold.client_scores import HeldOut
from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.own_layers import own_places
from fedunfold.core.params import flatten_model, load_model
from fedunfold.core.run_result import RunResult
from fedunfold.rules import RULES, WeightingRule, size
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method
from fedunfold.unfolding import learn
from tests.support.federations import RUN, BatchedRuns, Plain, assert_same, mlp, run_one, simulated, tiny

ENV = tiny({"a": 14, "b": 8, "c": 18}, participation_probability=0.6, rounds=4, seed=1)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def run(
    name: str, env: Environment = ENV, rule: WeightingRule | None = None, *, model: Any = None, **changes: Any
) -> RunResult:
    algorithm = replace(method(name).algorithm, **changes)
    return run_one(simulated(env, model), rule or size(), env.rounds, algorithm=algorithm)


class Watched:
    """A rule by size that notes what a server sees."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.rule = fu.rule("gradients", "accuracy", "start_loss", "loss")(self._weigh)
        self.metrics: list[ClientUpdates] = []

    def _weigh(self, updates: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
        self.rows.append(updates.entering.rows)
        self.gradients.append(updates.metric("gradients"))
        self.metrics.append(updates)
        assert updates.metrics.own is None
        return updates.num_examples / updates.num_examples.sum(), state


def trained(module: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> dict[str, Tensor]:
    """What a client comes to, as anybody trains a module."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "build", "own"),
    [("fedper", None, ("3.",)), ("fedper", normalized, ("3.",)), ("fedbn", normalized, ("1.",))],
    ids=["fedper-mlp", "fedper-module", "fedbn"],
)
def test_against_plain_pytorch(name: str, build: Callable[[], nn.Module] | None, own: tuple[str, ...]) -> None:
    """State by state: what is shared is averaged by size under `keep`, what is a client's own only it goes on from."""
    build = build or mlp(ENV)
    plain, module = Plain(ENV, build), build().double()
    federation = simulated(ENV, build)
    load_model(module, federation.initial_model(RUN))
    shared = {key: value.clone() for key, value in module.state_dict().items()}
    mine: dict[int, dict[str, Tensor]] = {}
    assert not all(all(plain.participated(t)) for t in range(ENV.rounds))
    for t in range(ENV.rounds):
        ends: list[dict[str, Tensor]] = []
        for k, here in enumerate(plain.participated(t)):
            module.load_state_dict(shared | mine.get(k, {}))
            ends.append(trained(module, plain.batches(t, k), ENV.lr) if here else shared)
            if here:
                mine[k] = {key: value for key, value in ends[k].items() if key.startswith(own)}
        mean = {
            key: sum(share * end[key] for share, end in zip(plain.shares, ends, strict=True))
            for key, value in shared.items()
            if value.is_floating_point() and not key.startswith(own)
        }
        shared |= mean
    result = run(name, model=build)
    for k in range(3):
        module.load_state_dict(shared | mine[k])
        assert_same(result.client_models[k], flatten_model(module))
    sizes = torch.tensor(plain.shares, dtype=torch.float64)
    averaged = {
        key: sum(share * mine[k][key] for k, share in enumerate(sizes)) for key in mine[0] if "tracked" not in key
    }
    module.load_state_dict(shared | averaged)
    assert_same(result.model, flatten_model(module))
    module.eval()
    data = ENV.load()
    right = module(data.x_test.double()).argmax(1) == data.y_test
    assert result.scores[-1] == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize("optimizer", [fu.sgd(), fu.momentum(0.5), fu.nova()], ids=lambda o: o.name)
@pytest.mark.parametrize(("name", "build"), [("fedper", None), ("fedbn", normalized)])
@pytest.mark.parametrize("absent", ["drop", "remember"])
def test_nothing_of_ones_own_layers_reaches_the_server(name: str, build: Any, optimizer: Any, absent: str) -> None:
    watched = Watched()
    changes: dict[str, Any] = {"local": optimizer, "absent": absent, "server": fu.adam(), "filter": "norm"}
    result = run(name, rule=watched.rule, model=build, **changes)
    layout = simulated(ENV, build).layout
    places = own_places(method(name).algorithm.own_layers, layout)
    others = torch.ones(layout.size, dtype=torch.bool)
    others[places] = False
    for rows in (*watched.rows, *watched.gradients):
        assert not rows[:, places].any()
    assert all(rows[:, others].any() for rows in watched.rows if len(rows))
    assert result.own is not None
    first = simulated(ENV, build).initial_model(RUN)[places]
    assert all((values != first).any() for values in result.own.values.values())


def test_reports_are_those_of_a_clients_own_model() -> None:
    """Its loss at the start, also where it is absent, and its accuracy at the end."""
    watched = Watched()
    run("fedper", rule=watched.rule)
    before = run("fedper", ENV.replace(rounds=3)).client_models
    after = run("fedper").client_models
    plain, last = Plain(ENV, mlp(ENV)), watched.metrics[-1]
    here = plain.participated(3)
    assert any(here) and not all(here)
    start_loss, loss, accuracy = (last.metric(name) for name in ("start_loss", "loss", "accuracy"))
    for k in range(3):
        x, y = plain.client(k)
        assert start_loss[k].item() == pytest.approx(nn.functional.cross_entropy(plain.module(before[k])(x), y).item())
        if here[k]:
            model = plain.train(before[k], 3, k).model
            assert accuracy[k].item() == pytest.approx((plain.module(model)(x).argmax(1) == y).double().mean().item())
            places = own_places("last", simulated(ENV).layout)
            assert_same(after[k][places], model[places])
        else:
            assert loss[k].item() == pytest.approx(sum(plain.losses_at(before[k], 3, k)))


def test_runs_that_train_together_keep_apart() -> None:
    algorithm = method("fedper").algorithm
    runs = ["trial-0", "trial-1"]
    together = run_rounds(BatchedRuns(ENV), size(), 4, runs, algorithm=algorithm)
    for name, found in zip(runs, together, strict=True):
        (alone,) = run_rounds(simulated(ENV), size(), 4, [name], algorithm=algorithm)
        assert_same(found.client_models, alone.client_models)
        assert found.scores == alone.scores


@pytest.mark.parametrize("killed_after", [0, 2])
def test_own_layers_are_resumed_byte_for_byte(tmp_path: Path, killed_after: int) -> None:
    whole, file, algorithm = tmp_path / "whole", tmp_path / "run", method("fedper").algorithm

    def kill(t: int, _: object) -> None:
        if t == killed_after:
            raise SystemExit

    (expected,) = run_rounds(simulated(ENV), size(), 4, [RUN], algorithm=algorithm, checkpoint=whole)
    with pytest.raises(SystemExit):
        run_rounds(simulated(ENV), size(), 4, [RUN], algorithm=algorithm, checkpoint=file, on_round=kill)
    (again,) = run_rounds(simulated(ENV), size(), 4, [RUN], algorithm=algorithm, checkpoint=file)
    assert file.read_bytes() == whole.read_bytes()
    assert torch.equal(again.client_models, expected.client_models)
    with pytest.raises(InputError):
        run_rounds(simulated(ENV), size(), 4, [RUN], checkpoint=file)


def opposite(seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(60, 4))
    return x, (x[:, 0] > 0).astype(int)


def test_of_two_clients_with_opposite_labels_both_are_served_by_layers_of_their_own() -> None:
    (x, y), (z, labels) = opposite(0), opposite(1)
    env = Environment.from_arrays(
        {"a": (x, y), "b": (z, 1 - labels)}, opposite(2), rounds=20, batch_size=10, lr=0.3, model=(8,)
    ).replace(holdout=0.3)
    table = fu.compare(env, ["fedavg", "fedper", "local"], trials=2)
    fedavg, fedper, local = (result.client_mean for result in table.methods)
    assert fedavg is not None and fedper is not None and local is not None
    assert fedavg < 75 and min(fedper, local) > 85
    held = env.load_held_out()
    assert held is not None
    result = table.methods[1].trials[0]
    for k, key in enumerate("ab"):
        rows, targets = held.client(k)
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        load_model(module, result.client_models[k])
        assert result.held_out[key] == pytest.approx((module(rows).argmax(1) == targets).double().mean().item())


def test_fine_tuning_goes_on_from_a_clients_own_layers() -> None:
    env = ENV.replace(holdout=0.25)
    result = run("fedper", env)
    tuning = HeldOut.of(simulated(env), "own").fine_tuning
    assert tuning is not None
    models, plain = tuning.models(result, RUN, method("fedper").algorithm), Plain(env, mlp(env))
    for k in range(3):
        assert_same(models[k], plain.train(result.client_models[k], env.rounds, k).model)
    (row,) = fu.compare(env, ["fedper"], trials=1, personal=0).methods
    assert row.fine_tuned == row.held_out


def test_one_sentence_where_it_does_not_work() -> None:
    kept = method("fedper").algorithm
    with pytest.raises(InputError, match="the model has none; give it some, or keep its last layer"):
        fu.compare(tiny(), ["fedavg", "fedbn"])
    with pytest.raises(InputError, match="the model has none"):
        fu.run(tiny(), "fedbn")
    with pytest.raises(InputError, match="nothing is left to aggregate"):
        fu.run(tiny(model=()), "fedper")
    with pytest.raises(InputError, match="cannot be learned where layers stay with the clients"):
        learn(simulated(tiny()), 3, algorithm=kept)
    with pytest.raises(InputError, match="stay with the clients go from round to round, and asynchronous rounds have"):
        replace(kept, schedule="asynchronous")
    with pytest.raises(InputError, match="unknown choice of layers that stay with the clients 'first'"):
        fu.Algorithm(own_layers="first")  # type: ignore[arg-type]
    assert "duw-fedper" not in fu.method_names() and "dr-fedbn" in fu.method_names()
    assert fu.Algorithm.from_description(kept.describe()) == kept


@pytest.mark.parametrize("name", ["fedadp", "fedfa", "dr"])
def test_rules_work_with_layers_that_stay(name: str) -> None:
    result = run("fedbn", rule=RULES.make(name), model=normalized)
    assert result.weights.sum(1).tolist() == pytest.approx([1] * 4)
    places = own_places("normalization", simulated(ENV, normalized).layout)
    same = (result.client_models[0] == result.client_models[1:]).all(0)
    assert not same[places].any() and int(same.sum()) == len(same) - len(places)

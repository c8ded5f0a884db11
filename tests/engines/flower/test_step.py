"""A round in NumPy: by hand, against Flower's strategy, behind FLARE's three methods, and what it refuses."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.core.parts import RoundDecision, ServerOptimizer
from fedunfold.engines.flower import WeightedStrategy
from fedunfold.rules import (
    WeightingRule,
    afl,
    dr,
    fedadp,
    fedawa,
    feddisco,
    fedfa,
    online_hypergradient,
    q_fedavg,
    size,
)
from fedunfold.rules.step import step
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from fedunfold.server.exp import Exp
from tests.support.grid import LocalGrid

EXAMPLE = Path(__file__).parents[3] / "examples" / "flare" / "aggregator.py"
SIZES = {"node:1": 30, "node:2": 10, "node:3": 900}
SHAPES = ((2, 3), (3,))
ROUNDS = 3


def opinionated() -> UnfoldedRule:
    """One that decides on weights, a step and a momentum, for as many rounds as the strategy will run."""
    random = torch.Generator().manual_seed(3)
    params = {
        name: value + 0.5 * torch.randn(value.shape, dtype=value.dtype, generator=random)
        for name, value in initial_parameters(8, 0).items()
    }
    return UnfoldedRule(params, horizon=ROUNDS)


def with_server(server: ServerOptimizer) -> UnfoldedRule:
    """One that was learned for a server of its own."""
    return replace(opinionated(), algorithm=fu.Algorithm(server=server, absent="drop"))


def delta(client: str, t: int) -> list[np.ndarray]:
    random = np.random.default_rng([int(client[-1]), t])
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def by_strategy(rule: WeightingRule, **settings: Any) -> list[np.ndarray]:
    """The model after some rounds of Flower, in which client 2 fails once."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        t = int(message.content.config_records["config"]["server-round"]) - 1  # type: ignore[arg-type]
        client = f"node:{context.node_id}"
        if (client, t) == ("node:2", 1):
            raise RuntimeError("out of power")
        sent = message.content.array_records["arrays"]
        moved = {n: Array(sent[n].numpy() + part) for n, part in zip(("w", "b"), delta(client, t), strict=True)}
        losses = {"loss": 1.0 + t, "start_loss": start_loss(client, t)}
        metrics = MetricRecord({"num-examples": SIZES[client], "num_steps": 2, "accuracy": 0.5, **losses})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    grid = LocalGrid(app, {int(name[-1]): {} for name in SIZES})
    start = ArrayRecord({n: Array(np.ones(s, dtype=np.float32)) for n, s in zip(("w", "b"), SHAPES, strict=True)})
    strategy = WeightedStrategy(rule, fraction_evaluate=0.0, **settings)
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    return [result.arrays[name].numpy() for name in ("w", "b")]


def start_loss(client: str, t: int) -> float:
    return 2.0 + t / int(client[-1])


def present(t: int) -> list[str]:
    return [client for client in SIZES if (client, t) != ("node:2", 1)]


@pytest.mark.parametrize("ratio", [None, 4.0])
@pytest.mark.parametrize(
    "rule",
    [
        *(size(), opinionated(), with_server(fu.adam(lr=0.1)), with_server(Exp()), fedadp(), dr(), fedfa()),
        *(q_fedavg(lr=0.1), afl(), online_hypergradient(step_size=0.1, lr=0.1)),
    ],
    ids=["size", "unfolded", "with adam", "with exp", "fedadp", "dr", "fedfa", "q-fedavg", "afl", "hypergradient"],
)
def test_it_is_a_round_of_the_strategy(rule: WeightingRule, ratio: float | None) -> None:
    model, state = [np.ones(shape, dtype=np.float32) for shape in SHAPES], None
    for t in range(ROUNDS):
        ids = present(t)
        update, decision, state = step(
            rule,
            [delta(client, t) for client in ids],
            [SIZES[client] for client in ids],
            state,
            client_ids=ids,
            num_steps=[2] * len(ids),
            metrics={
                "loss": [1.0 + t] * len(ids),
                "start_loss": [start_loss(client, t) for client in ids],
                "accuracy": [0.5] * len(ids),
            },
            max_examples_ratio=ratio,
        )
        assert float(decision.weights.sum()) == pytest.approx(1) and len(decision.weights) == len(ids)
        assert [part.dtype for part in update] == [np.float32, np.float32]
        model = [w + u for w, u in zip(model, update, strict=True)]
    for ours, theirs in zip(model, by_strategy(rule, max_examples_ratio=ratio), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)  # in single precision


def test_the_cap_changes_something() -> None:
    updates = [delta(client, 0) for client in SIZES]
    _, capped, _ = step(size(), updates, list(SIZES.values()), max_examples_ratio=4.0)
    assert capped.weights.tolist() == pytest.approx([30 / 120, 10 / 120, 80 / 120])  # 4 times the median of 30 and 10


def test_the_example_for_flare_is_a_round_of_the_strategy() -> None:
    spec = importlib.util.spec_from_file_location("flare_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    aggregator = module.RuleAggregator(opinionated())
    model = {name: np.ones(shape, dtype=np.float32) for name, shape in zip(("w", "b"), SHAPES, strict=True)}
    for t in range(ROUNDS):
        for client in present(t):
            meta = {"client_name": client, "NUM_STEPS_CURRENT_ROUND": SIZES[client]}
            params = dict(zip(("w", "b"), delta(client, t), strict=True))
            aggregator.accept_model(SimpleNamespace(params=params, meta=meta))
        update = aggregator.aggregate_model()
        aggregator.reset_stats()
        model = {name: model[name] + update[name] for name in model}

    @fu.rule()
    def without_steps(report: Any, state: Any) -> Any:  # FLARE's clients do not report them in this example
        return opinionated()(fu.ClientUpdates(**vars(report) | {"num_steps": 0 * report.num_steps}), state)

    for ours, theirs in zip(model.values(), by_strategy(without_steps), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_step_and_momentum_by_hand() -> None:
    @fu.rule()
    def halves(report: Any, state: Any) -> Any:
        return RoundDecision(torch.tensor([0.5, 0.5]), step=2.0, momentum=0.25), state

    rows = np.array([[1.0, 3.0], [3.0, 1.0]])
    first, decision, state = step(halves, rows, [1, 1])
    second, _, state = step(halves, rows, [1, 1], state)
    assert (first[0].tolist(), second[0].tolist()) == ([4.0, 4.0], [5.0, 5.0])
    assert (decision.step, decision.momentum, state["round"]) == (2.0, 0.25, 1)


def test_the_state_is_plain() -> None:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    rows = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    _, _, state = step(opinionated(), rows, [3, 1])
    json.dumps(state, default=plain)
    assert isinstance(state["previous"], np.ndarray)
    before = json.dumps(state, default=plain)
    step(opinionated(), rows, [3, 1], state)
    assert json.dumps(state, default=plain) == before, "a state is not changed in place"


def test_a_round_of_nobody_moves_nothing() -> None:
    _, _, state = step(opinionated(), np.ones((2, 3)), [1, 2])
    update, _, after = step(opinionated(), [], [], state)
    assert update == [] and after == state | {"round": 1}


ROW = np.ones(2)


@pytest.mark.parametrize(
    ("updates", "examples", "more", "message"),
    [
        ([ROW, ROW], [1], {}, "round 0: num_examples has 1 entries for 2 updates"),
        ([ROW, ROW], [1, 1], {"client_ids": ["a", "a"]}, "round 0: client_ids names a client twice"),
        ([ROW, np.ones(3)], [1, 1], {"client_ids": ["a", "b"]}, "round 0: the update of client b has other shapes"),
        ([ROW, np.array([1.0, np.nan])], [1, 1], {}, "round 0: the update of client 1 has values that are not finite"),
        ([np.ones(2, dtype=int)], [1], {}, "client 0 has arrays that are not of floats"),
        ([ROW, ROW], [1, -1], {"round": 4}, "round 4: client 1 has num_examples -1"),
        ([ROW, ROW], [0, 0], {}, "round 0: num_examples are all 0"),
        ([ROW, ROW], [1, 1], {"max_examples_ratio": 0.5}, "finite max_examples_ratio >= 1, not 0.5"),
        ([ROW, ROW], [1, 1], {"num_steps": [1]}, "num_steps has 1 entries"),
    ],
)
def test_what_is_refused(updates: Any, examples: Any, more: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        step(size(), updates, examples, **more)


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(InputError, match="round 0: rule 'dr' needs metrics with 'loss' of every client"):
        step(dr(), [ROW], [1])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (fedawa(), r"round 0: rule 'fedawa' compares models with w\^\(t\)"),
        (feddisco(), "round 0: rule 'feddisco' needs the label counts"),
        (q_fedavg(), "round 0: rule 'q-fedavg' needs the clients' learning rate"),
        (online_hypergradient(), "round 0: rule 'online-hypergradient' needs the clients' learning rate"),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_rules_that_read_what_a_round_in_arrays_does_not_know(rule: WeightingRule, message: str) -> None:
    with pytest.raises(InputError, match=message):
        step(rule, [ROW, 2 * ROW], [1, 1], num_steps=[1, 1], metrics={"start_loss": [1.0, 1.0]})

"""Everything that FedAvg's constructor and start take, given to it and to `WeightedStrategy`, with the same outcome.

The list of what there is comes from Flower itself: a setting or hook that another version adds has no case here, and so
fails until it has one.
"""

import inspect
import random
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedunfold.engines.flower import WeightedStrategy
from tests.engines.flower.test_hooks import BOTH, assert_alike
from tests.engines.flower.test_strategy import initial
from tests.support.grid import LocalGrid

NODES: dict[int, dict[str, Any]] = {node: {"pull": node, "n": 5 * node} for node in range(1, 7)}


def largest(contents: list[RecordDict], key: str) -> MetricRecord:
    """Of the replies; not their mean."""
    return MetricRecord({"most": max(float(c.metric_records["metrics"][key]) for c in contents)})  # type: ignore[arg-type]


SETTINGS: dict[str, Any] = {
    "fraction_train": 0.5,
    "fraction_evaluate": 0.5,
    "min_train_nodes": 5,
    "min_evaluate_nodes": 4,
    "min_available_nodes": 6,
    "weighted_by_key": "loss",
    "arrayrecord_key": "model",
    "configrecord_key": "settings",
    "train_metrics_aggr_fn": largest,
    "evaluate_metrics_aggr_fn": largest,
}
OTHERS: dict[str, Any] = {"min_train_nodes": {"fraction_train": 0.1}, "min_evaluate_nodes": {"fraction_evaluate": 0.1}}
"""What has to be set too for a setting to matter."""
START: dict[str, Any] = {
    "initial_arrays": initial(),
    "num_rounds": 2,
    "timeout": 12.5,
    "train_config": ConfigRecord({"lr": 0.5}),
    "evaluate_config": ConfigRecord({"batch": 7}),
    "evaluate_fn": lambda t, arrays: MetricRecord({"mean": float(arrays["w"].numpy().mean()), "t": t}),
}


class Listening(LocalGrid):
    """Notes what is sent, and how long answers are waited for."""

    def __init__(self, nodes: dict[int, dict[str, Any]]) -> None:
        app = ClientApp()
        app.train()(reporting)
        app.evaluate()(reporting)
        super().__init__(app, nodes)
        self.waits: list[float | None] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        self.waits.append(timeout)
        return super().send_and_receive(messages, timeout=timeout)

    def heard(self) -> list[Any]:
        return [
            (m.metadata.message_type, m.metadata.dst_node_id, sorted(m.content), [dict(c) for c in configs_of(m)])
            for m in self.sent
        ]


def configs_of(message: Message) -> list[ConfigRecord]:
    return list(message.content.config_records.values())


def reporting(message: Message, context: Context) -> Message:
    """An ordinary client that takes the keys of records as they come, with a list among its metrics."""
    (arrays,), node = message.content.array_records.values(), context.node_id
    moved = {name: Array((a.numpy() + node * 0.1).astype(a.numpy().dtype)) for name, a in arrays.items()}
    count = int(context.node_config["n"])
    numbers = {"num-examples": count, "loss": 0.3 * node, "per-class": [0.5 * node, float(node**2)]}
    content = RecordDict({"metrics": MetricRecord(numbers)})  # type: ignore[arg-type]
    if message.metadata.message_type == "train":
        content["arrays"] = ArrayRecord(moved)
    return Message(content, reply_to=message)


def test_all_there_is_has_a_case() -> None:
    assert list(SETTINGS) == list(inspect.signature(FedAvg).parameters)
    assert set(START) == set(inspect.signature(FedAvg.start).parameters) - {"self", "grid"}
    hooks = {name for name in vars(Strategy) | vars(FedAvg) if not name.startswith("_")}
    assert hooks == {
        *("aggregate_evaluate", "aggregate_train", "configure_evaluate", "configure_train", "start", "summary")
    }
    assert all(
        inspect.signature(getattr(WeightedStrategy, name)).parameters.keys()
        == inspect.signature(getattr(FedAvg, name)).parameters.keys()
        for name in hooks
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_does_what_it_does_for_fedavg(name: str) -> None:
    found = []
    for kind in BOTH:
        random.seed(4)
        grid = Listening(NODES)
        strategy = kind(**{name: SETTINGS[name]}, **OTHERS.get(name, {}))
        found.append((strategy.start(grid, initial(), num_rounds=2), grid.heard()))
    (ours, own), (theirs, other) = found
    assert own == other and own
    assert_alike(ours, theirs)
    random.seed(4)
    plain = Listening(NODES)
    usual = FedAvg().start(plain, initial(), num_rounds=2)
    if name != "min_available_nodes":  # there are enough: it is only waited for
        before = (usual.train_metrics_clientapp, usual.evaluate_metrics_clientapp, plain.heard())
        assert (theirs.train_metrics_clientapp, theirs.evaluate_metrics_clientapp, other) != before, "it matters"


@pytest.mark.parametrize("name", START)
def test_an_argument_of_start_does_what_it_does_for_fedavg(name: str) -> None:
    given: dict[str, Any] = {"initial_arrays": initial(), "num_rounds": 1, name: START[name]}
    found = []
    for kind in BOTH:
        random.seed(4)
        grid = Listening(NODES)
        configs: dict[str, Any] = {
            key: ConfigRecord(dict(value)) if key.endswith("config") else value for key, value in given.items()
        }
        found.append((kind().start(grid, **configs), grid.heard(), grid.waits))
    (ours, own, waits), (theirs, other, their_waits) = found
    assert own == other and own
    assert waits == their_waits
    assert_alike(ours, theirs)
    if name == "timeout":
        assert set(waits) == {12.5}
    if name == "evaluate_fn":
        assert [dict(ours.evaluate_metrics_serverapp[t])["t"] for t in (0, 1)] == [0, 1]


def test_enough_nodes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is there is not sent a message before there are as many as are wanted."""
    for kind in BOTH:
        grid, asked = Listening(NODES), list[int]()

        def connected(grid: Listening = grid, asked: list[int] = asked) -> list[int]:
            asked.append(len(grid.sent))
            return list(NODES)[: len(asked)]

        monkeypatch.setattr(grid, "get_node_ids", connected)
        monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda seconds: None)
        strategy = kind(min_available_nodes=6, fraction_evaluate=0.0)
        list(strategy.configure_train(1, initial(), ConfigRecord(), grid))
        assert len(asked) >= 6 and not any(asked)


def test_metrics_that_are_lists_are_averaged_entry_by_entry() -> None:
    ours, theirs = (kind().start(Listening(NODES), initial(), num_rounds=1) for kind in BOTH)
    assert_alike(ours, theirs)
    sizes = {node: 5 * node for node in NODES}
    mean = [
        sum(n * v for n, v in zip(sizes.values(), column, strict=True)) / sum(sizes.values())
        for column in ([0.5 * node for node in NODES], [float(node**2) for node in NODES])
    ]
    assert ours.train_metrics_clientapp[1]["per-class"] == pytest.approx(mean)


def test_arrays_of_another_start_are_ones_own() -> None:
    """An ArrayRecord that is given is never written to."""
    begin = initial()
    before = {name: array.data for name, array in begin.items()}
    WeightedStrategy().start(Listening(NODES), begin, num_rounds=2)
    assert {name: array.data for name, array in ArrayRecord(dict(begin)).items()} == before

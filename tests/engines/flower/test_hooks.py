"""What FedAvg takes and what is built around it: the same replies to it and to `WeightedStrategy`, the same outcome."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedYogi,
    Result,
    Strategy,
)

import fedunfold as fu
from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower import WeightedStrategy
from tests.engines.flower.test_strategy import NODES, app_of, initial, ordinary, start
from tests.support.grid import LocalGrid

CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
BOTH = (WeightedStrategy, FedAvg)


def assert_alike(ours: Result, theirs: Result) -> None:
    """The same model, of the same types, and the same metrics of all rounds."""
    assert list(ours.arrays) == list(theirs.arrays)
    for name, array in theirs.arrays.items():
        found, expected = ours.arrays[name].numpy(), array.numpy()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_allclose(found, expected, **CLOSE)
    for stage in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        mine, other = getattr(ours, stage), getattr(theirs, stage)
        assert mine.keys() == other.keys()
        for t, metrics in other.items():
            assert dict(mine[t]) == {name: pytest.approx(value) for name, value in metrics.items()}


def quiet(message: Message, context: Context) -> Message:
    """An ordinary client that takes the keys of records as they come, with a number in place of a count."""
    (arrays,), node = message.content.array_records.values(), context.node_id
    moved = {name: Array((a.numpy() + node * 0.1).astype(a.numpy().dtype)) for name, a in arrays.items()}
    metrics = MetricRecord({"importance": 0.37 * node, "per-class": [0.5 * node, 2.0], "rounds": node})
    return Message(RecordDict({"mine": ArrayRecord(moved), "numbers": metrics}), reply_to=message)


# --- its settings ------------------------------------------------------------------------------------------


def test_functions_for_metrics_get_what_fedavgs_get() -> None:
    def run(kind: type[FedAvg]) -> tuple[Result, list[Any]]:
        seen: list[Any] = []

        def worst(stage: str) -> Any:
            def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
                records = [dict(next(iter(content.metric_records.values()))) for content in contents]
                arrays = [sorted(record) for content in contents for record in content.array_records.values()]
                seen.append((stage, key, sorted(map(str, records)), arrays))
                return MetricRecord({"worst": max(float(record["num-examples"]) for record in records)})  # type: ignore[arg-type]

            return aggregate

        strategy = kind(train_metrics_aggr_fn=worst("train"), evaluate_metrics_aggr_fn=worst("evaluate"))
        return start(strategy, LocalGrid(app_of(), NODES)), seen

    (ours, own), (theirs, other) = run(WeightedStrategy), run(FedAvg)
    assert own == other
    assert [stage for stage, *_ in own] == ["train", "evaluate"] * 2
    assert_alike(ours, theirs)


def test_a_function_for_metrics_is_asked_also_where_all_counts_are_0() -> None:
    def spoil(reply: Message, node: int) -> Message:
        reply.content.metric_records["metrics"]["num-examples"] = 0
        return reply

    strategy = WeightedStrategy(
        fu.uniform(), evaluate_metrics_aggr_fn=lambda contents, key: MetricRecord({"replies": len(contents)})
    )
    result = start(strategy, LocalGrid(app_of(), NODES, spoil), rounds=1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"replies": 3}
    assert result.train_metrics_clientapp == {}


def test_keys_lists_and_real_weights() -> None:
    def run(kind: type[FedAvg]) -> tuple[Result, list[Any]]:
        grid = LocalGrid(app_of(train=quiet), NODES)
        strategy = kind(
            weighted_by_key="importance", arrayrecord_key="model", configrecord_key="settings", fraction_evaluate=0.0
        )
        config = ConfigRecord({"lr": 0.5})
        result = strategy.start(grid, initial(), num_rounds=2, train_config=config)
        return result, [(sorted(m.content), dict(m.content.config_records["settings"])) for m in grid.sent]

    (ours, own), (theirs, other) = run(WeightedStrategy), run(FedAvg)
    assert own == other == [(["model", "settings"], {"lr": 0.5, "server-round": 2})] * 6
    assert_alike(ours, theirs)
    mean = sum(0.37 * node * 0.5 * node for node in NODES) / sum(0.37 * node for node in NODES)
    assert ours.train_metrics_clientapp[1]["per-class"] == pytest.approx([mean, 2.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"fraction_train": 0.5, "min_train_nodes": 1, "fraction_evaluate": 0.7, "min_evaluate_nodes": 2},
        {"fraction_train": 0.1, "min_train_nodes": 3, "min_available_nodes": 6, "fraction_evaluate": 0.0},
        {"fraction_train": 0.0, "fraction_evaluate": 1.0},
    ],
    ids=str,
)
def test_the_same_nodes_are_sampled(settings: dict[str, Any]) -> None:
    nodes: dict[int, dict[str, Any]] = {node: {"pull": node, "n": 5 * node} for node in range(1, 7)}
    found = []
    for kind in BOTH:
        random.seed(3)
        grid = LocalGrid(app_of(), nodes)
        result = start(kind(**settings), grid, rounds=3)
        found.append((result, [(m.metadata.message_type, m.metadata.dst_node_id) for m in grid.sent]))
    (ours, own), (theirs, other) = found
    assert own == other and own
    if settings["fraction_train"]:
        assert_alike(ours, theirs)


def test_several_array_records_are_refused_as_by_fedavg() -> None:
    """It ends the run; here each such reply is rejected, and a run of which nothing else came is an error."""

    def two(message: Message, context: Context) -> Message:
        reply = ordinary(message, context)
        reply.content["more"] = reply.content["arrays"]
        return reply

    with pytest.raises(InconsistentMessageReplies, match="exactly one ArrayRecord"):
        start(FedAvg(), LocalGrid(app_of(train=two), NODES))
    with pytest.raises(FederationError, match="has 2 array records in place of one"):
        start(WeightedStrategy(), LocalGrid(app_of(train=two), NODES))


def test_a_table_of_weights_goes_by_the_clients_it_names() -> None:
    """Whoever answers first; a client that does not answer has no part in its round."""
    table = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]
    rule = fu.fixed(table, client_ids=["node:3", "node:1", "node:2"])

    def spoil(reply: Message, node: int) -> Message | None:
        return None if node == 1 and strategy.weights and reply.metadata.message_type == "train" else reply

    strategy = WeightedStrategy(rule)
    result = start(strategy, LocalGrid(app_of(), NODES, spoil))
    assert strategy.weights[0] == pytest.approx({"node:3": 0.5, "node:1": 0.3, "node:2": 0.2})
    first = (0.5 * 4 + 0.3 * 1 + 0.2 * 2) / 2
    second = first + (0.1 * 0.5 * (4 - first) + 0.7 * 0.5 * (2 - first)) / 0.8
    assert result.arrays["b"].numpy() == pytest.approx(second)


# --- server optimisers -------------------------------------------------------------------------------------

OPTIMISERS: dict[str, tuple[Any, Any]] = {
    "adam": (
        fu.adam(lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2, v0=0, corrected=True),
        lambda: FedAdam(eta=0.05, beta_1=0.8, beta_2=0.95, tau=1e-2),
    ),
    "yogi": (
        fu.yogi(lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2, v0=0),
        lambda: FedYogi(eta=0.05, beta_1=0.8, beta_2=0.95, tau=1e-2),
    ),
    "adagrad": (fu.adagrad(lr=0.05, beta1=0, tau=1e-2, v0=0), lambda: FedAdagrad(eta=0.05, tau=1e-2)),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_server_optimisers_are_flowers(name: str) -> None:
    server, flowers = OPTIMISERS[name]
    begin = ArrayRecord({"w": Array(np.linspace(-1, 6, 12, dtype=np.float32).reshape(3, 4))})
    found = []
    for strategy in (WeightedStrategy(server=server), flowers()):
        models: list[np.ndarray] = []

        def note(t: int, arrays: ArrayRecord, models: list[np.ndarray] = models) -> None:
            models.append(arrays["w"].numpy())

        strategy.start(LocalGrid(app_of(), NODES), begin, num_rounds=4, evaluate_fn=note)
        found.append(models)
    ours, theirs = found
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(theirs[-1] - theirs[0]).max() > 0.01


# --- wrappers and loops of others --------------------------------------------------------------------------


def bits(message: Message, context: Context) -> Message:
    """What Flower's mod of adaptive clipping adds."""
    reply = ordinary(message, context)
    reply.content.metric_records["metrics"]["norm_bit"] = int(context.node_id == 1)
    return reply


WRAPPERS: dict[str, Any] = {
    "server, fixed": lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 0.4, 1.5, 3),
    "server, adaptive": lambda inner: DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 3, 2.0),
    "client, fixed": lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 0.4, 1.5, 3),
    "client, adaptive": lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 3, 2.0),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_differential_privacy_around_the_strategy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise around both, and a run after another begins anew."""
    begin = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "b": Array(np.ones(3, np.float32))})
    found = []
    for inner in (WeightedStrategy(), FedAvg()):
        strategy = WRAPPERS[name](inner)
        for _ in range(2):
            monkeypatch.setattr(np.random, "normal", np.random.default_rng(5).normal)
            random.seed(5)
            grid = LocalGrid(app_of(train=bits), NODES)
            if "adaptive" in name:
                strategy.clipping_norm = 2.0
            result = strategy.start(grid, begin, num_rounds=3)
        found.append(result)
    assert_alike(*found)


class Moved(Strategy):
    """A wrapper that changes the model by 1 after every round."""

    def __init__(self, inner: FedAvg) -> None:
        self.inner = inner

    def summary(self) -> None:
        self.inner.summary()

    def configure_train(self, *arguments: Any, **settings: Any) -> Any:
        return self.inner.configure_train(*arguments, **settings)

    def configure_evaluate(self, *arguments: Any, **settings: Any) -> Any:
        return self.inner.configure_evaluate(*arguments, **settings)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = self.inner.aggregate_train(server_round, replies)
        assert arrays is not None
        return ArrayRecord({name: Array(a.numpy() + np.float32(1)) for name, a in arrays.items()}), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        return self.inner.aggregate_evaluate(server_round, replies)


def test_updates_are_counted_from_the_model_that_was_sent() -> None:
    """FedAdam counts from the model that a wrapper has changed, and so does adam here."""
    begin = ArrayRecord({"w": Array(np.linspace(-1, 6, 12, dtype=np.float32))})
    server, flowers = OPTIMISERS["adam"]
    ours, theirs = (
        Moved(inner).start(LocalGrid(app_of(), NODES), begin, num_rounds=3).arrays["w"].numpy()
        for inner in (WeightedStrategy(server=server), flowers())
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def own_loop(strategy: FedAvg, grid: LocalGrid, rounds: int) -> ArrayRecord:
    """As somebody writes it who wants to look at every round."""
    arrays: ArrayRecord | None = initial()
    for t in range(1, rounds + 1):
        assert arrays is not None
        replies = grid.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord(), grid))
        arrays, metrics = strategy.aggregate_train(t, replies)
        assert metrics is not None and arrays is not None
        found = grid.send_and_receive(strategy.configure_evaluate(t, arrays, ConfigRecord(), grid))
        assert strategy.aggregate_evaluate(t, found) is not None
    assert arrays is not None
    return arrays


def test_a_loop_of_ones_own() -> None:
    strategy = WeightedStrategy()
    for _ in range(2):  # the second begins anew
        ours, theirs = (own_loop(each, LocalGrid(app_of(), NODES), 3) for each in (strategy, FedAvg()))
        for name in theirs:
            np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), **CLOSE)
        assert len(strategy.weights) == 3


def test_what_a_loop_of_ones_own_cannot_have(tmp_path: Any) -> None:
    grid = LocalGrid(app_of(), NODES)
    with pytest.raises(InputError, match=r"call its start\(\) or its configure_train\(\) first"):
        WeightedStrategy().aggregate_train(1, [])
    with pytest.raises(InputError, match="only WeightedStrategy's own start"):
        WeightedStrategy(checkpoint=tmp_path / "state").configure_train(1, initial(), ConfigRecord(), grid)
    strategy = WeightedStrategy()
    strategy.configure_train(1, initial(), ConfigRecord(), grid)
    with pytest.raises(InputError, match="the model to be sent has no array 'b', which the initial arrays have; send"):
        strategy.configure_train(2, ArrayRecord({"w": initial()["w"]}), ConfigRecord(), grid)


def test_evaluation_alone_is_fedavgs() -> None:
    found = []
    for strategy in (WeightedStrategy(), FedAvg()):
        grid = LocalGrid(app_of(), NODES)
        replies = grid.send_and_receive(strategy.configure_evaluate(1, initial(), ConfigRecord(), grid))
        metrics = strategy.aggregate_evaluate(1, replies)
        assert metrics is not None
        found.append(dict(metrics))
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("how", ["another config", "fewer nodes", "messages of its own", "another aggregate"])
def test_subclasses_that_override_a_hook(how: str) -> None:
    def overridden(base: type[FedAvg]) -> FedAvg:
        class Mine(base):  # type: ignore[misc, valid-type]
            def configure_train(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
                if how == "messages of its own":
                    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": t})})
                    return [Message(content, node, "train") for node in (1, 3)]
                if how == "another config":
                    config["lr"] = 1 / t
                messages = list(super().configure_train(t, arrays, config, grid))
                return messages if how != "fewer nodes" else [m for m in messages if m.metadata.dst_node_id != t]

            def aggregate_train(self, t: int, replies: Iterable[Message]) -> Any:
                arrays, metrics = super().aggregate_train(t, replies)
                assert arrays is not None
                if how == "another aggregate":
                    halved = {name: Array((a.numpy() / 2).astype(a.numpy().dtype)) for name, a in arrays.items()}
                    arrays = ArrayRecord(halved)
                return arrays, metrics

        return Mine()

    found = []
    for base in BOTH:
        strategy = overridden(base)
        found.append(start(strategy, LocalGrid(app_of(), NODES), rounds=3))
        if isinstance(strategy, WeightedStrategy):
            assert strategy.failures.as_dict() == {}
    assert_alike(*found)

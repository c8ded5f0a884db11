"""WeightedStrategy in the place of FedAvg, with ordinary Flower clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedunfold as fu
from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower import ClientDescription, WeightedStrategy, registration_mod, report_metrics_mod
from fedunfold.engines.flower.model_arrays import RecordLayout
from fedunfold.rules.learned import LearnedWeights
from tests.support.grid import LocalGrid

NODES: dict[int, dict[str, Any]] = {1: {"pull": 1.0, "n": 10}, 2: {"pull": 2.0, "n": 20}, 3: {"pull": 4.0, "n": 10}}


def ordinary(message: Message, context: Context) -> Message:
    """Moves the model halfway to its own target, as any Flower client would train."""
    target = float(context.node_config["pull"])
    arrays = message.content.array_records["arrays"]
    moved = {
        name: Array(a if a.dtype.kind == "i" else (a + 0.5 * (target - a)).astype(a.dtype))
        for name, a in ((name, array.numpy()) for name, array in arrays.items())
    }
    metrics = MetricRecord({"num-examples": int(context.node_config["n"]), "loss": target, "accuracy": 1 / target})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


def app_of(keys: dict[int, str] | None = None, train: Callable[[Message, Context], Message] = ordinary) -> ClientApp:
    def describe(context: Context) -> ClientDescription:
        assert keys is not None
        return ClientDescription(keys[context.node_id], (int(context.node_config["n"]) - 1, 1))

    app = ClientApp(mods=[] if keys is None else [registration_mod(describe)])
    app.train()(train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 5, "eval_loss": float(context.node_config["pull"])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def initial() -> ArrayRecord:
    return ArrayRecord(
        {
            "w": Array(np.zeros((2, 3), dtype=np.float32)),
            "b": Array(np.zeros(3, dtype=np.float32)),
            "count": Array(np.array([7])),
        }
    )


def start(strategy: FedAvg, grid: LocalGrid, rounds: int = 2) -> Any:
    return strategy.start(grid, initial(), num_rounds=rounds, timeout=5)


def trained(result: Any) -> float:
    values = result.arrays["w"].numpy()
    assert values.shape == (2, 3)
    assert (values == values[0, 0]).all()
    return float(values[0, 0])


def test_size_weights_are_fedavg() -> None:
    ours, theirs = (start(strategy, LocalGrid(app_of(), NODES)) for strategy in (WeightedStrategy(), FedAvg()))
    assert trained(ours) == pytest.approx(trained(theirs))
    assert ours.arrays["count"].numpy().tolist() == pytest.approx(theirs.arrays["count"].numpy().tolist())
    assert ours.arrays["w"].numpy().dtype == np.float32
    for rounds, expected in (
        (ours.evaluate_metrics_clientapp, theirs.evaluate_metrics_clientapp),
        (ours.train_metrics_clientapp, theirs.train_metrics_clientapp),
    ):
        assert {t: dict(found) for t, found in rounds.items()} == {
            t: pytest.approx(dict(found), rel=1e-12) for t, found in expected.items()
        }
    assert ours.evaluate_metrics_clientapp[2]["eval_loss"] == pytest.approx((1 + 2 + 4) / 3)
    assert ours.train_metrics_clientapp[1]["loss"] == pytest.approx((10 + 2 * 20 + 4 * 10) / 40)


def test_every_rule_by_hand() -> None:
    """One round from 0: client k moves to target/2, so the model is Σ Θ_k target_k / 2."""
    by_rule = {
        fu.uniform(): [1 / 3, 1 / 3, 1 / 3],
        fu.dr(q=1): [10 * 1 / 250, 20 * 4 / 250, 10 * 16 / 250],
    }
    for rule, weights in by_rule.items():
        strategy = WeightedStrategy(rule)
        result = start(strategy, LocalGrid(app_of(), NODES), rounds=1)
        assert [strategy.weights[0][f"node:{node}"] for node in (1, 2, 3)] == pytest.approx(weights)
        assert trained(result) == pytest.approx(sum(w * t / 2 for w, t in zip(weights, (1, 2, 4), strict=True)))


@pytest.mark.parametrize("rule", [fu.fedadp(), fu.fedfa()], ids=lambda rule: rule.name)
def test_rules_that_need_more(rule: Any) -> None:
    strategy = WeightedStrategy(rule)
    start(strategy, LocalGrid(app_of(), NODES))
    assert sum(strategy.weights[-1].values()) == pytest.approx(1)
    assert strategy.failures.as_dict() == {}


def test_learned_weights_go_by_client_id() -> None:
    """Nodes are numbered otherwise than clients are listed."""
    weights = torch.tensor([[0.7, 0.1, 0.2]], dtype=torch.float64)
    learned = LearnedWeights(("c", "a", "b"), weights, torch.zeros(0), weights[None], {})
    strategy = WeightedStrategy(learned)
    result = start(strategy, LocalGrid(app_of({1: "a", 2: "b", 3: "c"}), NODES), rounds=1)
    assert trained(result) == pytest.approx((0.1 * 1 + 0.2 * 2 + 0.7 * 4) / 2)


def test_server_optimisers() -> None:
    strategy = WeightedStrategy(server=fu.server.momentum(0.5))
    result = start(strategy, LocalGrid(app_of(), NODES))
    mean = (10 + 40 + 40) / 40
    first = 0.5 * mean
    second = 0.5 * (mean - first)
    assert trained(result) == pytest.approx(first + (0.5 * first + second))


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_absent_clients(absent: Any) -> None:
    """Node 3 answers in the first round only."""

    def spoil(reply: Message, node: int) -> Message | None:
        return None if node == 3 and reply.metadata.message_type == "train" and len(strategy.weights) == 1 else reply

    strategy = WeightedStrategy(fu.uniform(), absent=absent)
    result = start(strategy, LocalGrid(app_of(), NODES, spoil))
    first = (1 + 2 + 4) / 6
    moves = [0.5 * (target - first) for target in (1, 2)]
    last = {"keep": sum(moves) / 3, "drop": sum(moves) / 2, "remember": (sum(moves) + 2) / 3}[absent]
    assert trained(result) == pytest.approx(first + last)
    assert strategy.failures.as_dict() == {"node:3": {"no answer": 1}}


# --- what clients may send ---------------------------------------------------------------------------------


def changed(reply: Message, **arrays: np.ndarray) -> RecordDict:
    record = dict(reply.content.array_records["arrays"].items())
    record.update({name: Array(value) for name, value in arrays.items()})
    return RecordDict({"arrays": ArrayRecord(record), "metrics": reply.content["metrics"]})


def raw(reply: Message, data: bytes) -> RecordDict:
    """The array b replaced by bytes that say they are a numpy file."""
    record = dict(reply.content.array_records["arrays"].items())
    record["b"] = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=data)
    return RecordDict({"arrays": ArrayRecord(record), "metrics": reply.content["metrics"]})


def _npy(kind: str, shape: str, size: int) -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(size)


BAD: dict[str, Callable[[Message], RecordDict]] = {
    "NaN": lambda reply: changed(reply, b=np.full(3, np.nan, dtype=np.float32)),
    "infinite": lambda reply: changed(reply, b=np.array([np.inf, -np.inf, 0], dtype=np.float32)),
    "another shape": lambda reply: changed(reply, b=np.zeros(4, dtype=np.float32)),
    "complex numbers": lambda reply: changed(reply, b=np.zeros(3, dtype=np.complex64)),
    "another name": lambda reply: changed(reply, c=np.zeros(3, dtype=np.float32)),
    "no arrays": lambda reply: RecordDict({"metrics": reply.content["metrics"]}),
    "two array records": lambda reply: RecordDict({**reply.content, "more": reply.content["arrays"]}),
    "no metrics": lambda reply: RecordDict({"arrays": reply.content["arrays"]}),
    "nothing": lambda reply: RecordDict(),
    "long doubles": lambda reply: changed(reply, b=np.zeros(3, dtype=np.longdouble)),
    "objects": lambda reply: raw(reply, _npy("|O", "(3,)", 24)),
    "a header that lies": lambda reply: raw(reply, _npy("<f4", "(100000000000000,)", 12)),
    "an absurd header": lambda reply: raw(reply, _npy("<f4", "(1" + "0" * 30 + ",)", 12)),
    "a zip file": lambda reply: raw(reply, b"PK\x03\x04" + bytes(40)),
    "no bytes": lambda reply: raw(reply, b""),
    "far too large": lambda reply: changed(reply, b=np.full(3, 3e38, dtype=np.float32)),
    "another counter": lambda reply: changed(reply, count=np.zeros(10)),
    "a counter that is no number": lambda reply: changed(reply, count=np.array([np.nan])),
    "a negative loss": lambda reply: RecordDict(
        {"arrays": reply.content["arrays"], "metrics": MetricRecord({"num-examples": 10, "loss": -1.0})}
    ),
    "no loss": lambda reply: RecordDict(
        {"arrays": reply.content["arrays"], "metrics": MetricRecord({"num-examples": 10})}
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_rejected(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if node == 2 and reply.metadata.message_type == "train":
            reply.content = RecordDict({**reply.content.config_records, **BAD[kind](reply)})
        return reply

    strategy = WeightedStrategy(fu.dr(q=0), absent="drop")
    grid = LocalGrid(app_of({1: "ann", 2: "bob", 3: "cat"}), NODES, spoil)
    result = start(strategy, grid, rounds=3)
    assert strategy.failures.as_dict() == {"bob": {"rejected": 3}}
    assert "client bob: rejected" in caplog.text
    assert 1 < trained(result) < 4


OTHER_ARRAYS: dict[str, tuple[Callable[[Message], RecordDict], str]] = {
    "a shape numpy would stretch": (
        lambda reply: changed(reply, b=np.ones(1, dtype=np.float32)),
        "has 'b' of shape [1] in place of [3], the initial one",
    ),
    "the same number of entries": (
        lambda reply: changed(reply, w=np.ones((3, 2), dtype=np.float32)),
        "has 'w' of shape [3, 2] in place of [2, 3], the initial one",
    ),
    "one more": (
        lambda reply: changed(reply, c=np.ones(3, dtype=np.float32)),
        "has an array 'c', which the initial arrays do not have",
    ),
    "one less": (
        lambda reply: RecordDict(
            {
                "arrays": ArrayRecord({"w": reply.content.array_records["arrays"]["w"]}),
                "metrics": reply.content["metrics"],
            }
        ),
        "has no array 'b', which the initial arrays have",
    ),
}


@pytest.mark.parametrize("kind", OTHER_ARRAYS)
def test_other_arrays_are_never_averaged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One client's are rejected in a sentence that names its node; where all send them, the run is an error."""
    change, said = OTHER_ARRAYS[kind]
    everybody = False

    def spoil(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type == "train" and (everybody or node == 2):
            reply.content = change(reply)
        return reply

    strategy = WeightedStrategy()
    result = start(strategy, LocalGrid(app_of(), NODES, spoil), rounds=1)
    assert f"client node:2: rejected (round 0: {said})" in caplog.text
    assert strategy.failures.as_dict() == {"node:2": {"rejected": 1}}
    others = {node: config for node, config in NODES.items() if node != 2}
    assert trained(result) == trained(start(FedAvg(), LocalGrid(app_of(), others), rounds=1))
    everybody = True
    with pytest.raises(FederationError, match=r"none of 2 rounds has trained the model.*client node:\d has") as stopped:
        start(WeightedStrategy(), LocalGrid(app_of(), NODES, spoil))
    assert said in str(stopped.value)


def test_an_error_and_an_inflated_count(caplog: pytest.LogCaptureFixture) -> None:
    """A count is taken within bounds."""

    def spoil(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type != "train":
            return reply
        if node == 1:
            failed = Message(Error(5, "no disk"), reply_to=Message(RecordDict(), 1, "train"))
            failed.metadata.__dict__["_src_node_id"] = 1
            return failed
        if node == 2:
            reply.content.metric_records["metrics"]["num-examples"] = 10**12
        if node == 3 and strategy.weights:
            reply.content.metric_records["metrics"]["num-examples"] = 10**8
        return reply

    strategy = WeightedStrategy()
    start(strategy, LocalGrid(app_of(), NODES, spoil))
    assert strategy.failures.as_dict() == {"node:1": {"rejected": 2}, "node:2": {"rejected": 2}}
    assert strategy.weights == [{"node:3": 1.0}, {"node:3": 1.0}]
    assert "failed: no disk" in caplog.text
    assert "1000000000000 is more than the 1000000000 samples of a client" in caplog.text


@pytest.mark.parametrize("keys", [None, {1: "a", 2: "b", 3: "c"}])
def test_a_run_that_trains_nothing_is_an_error(keys: Any) -> None:
    def lost(reply: Message, node: int) -> Message | None:
        return None if reply.metadata.message_type == "train" else reply

    strategy = WeightedStrategy(fu.uniform())
    with pytest.raises(FederationError, match=r"none of 2 rounds has trained the model.*no client has sent an update"):
        start(strategy, LocalGrid(app_of(keys), NODES, lost), rounds=2)
    assert strategy.weights == [{}, {}]

    def broken(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type == "train" and strategy.weights:
            reply.content = BAD["NaN"](reply)
        return lost(reply, node) if not strategy.weights else reply

    strategy = WeightedStrategy()
    with pytest.raises(FederationError, match="none of 2 rounds"):
        start(strategy, LocalGrid(app_of(keys), NODES, broken), rounds=2)


def test_flower_samples_the_cohort_itself() -> None:
    with pytest.raises(FederationError, match=r"none of 2 rounds .*'unbiased' in round 1 needs to know how the cohort"):
        start(WeightedStrategy(fu.unbiased()), LocalGrid(app_of(), NODES), rounds=2)


def test_a_run_without_training_is_none() -> None:
    strategy = WeightedStrategy(fraction_train=0.0)
    start(strategy, LocalGrid(app_of(), NODES), rounds=1)
    assert strategy.weights == []


def test_a_client_keeps_its_id_over_a_restart() -> None:
    keys = {1: "ann", 2: "bob", 3: "cat", 9: "bob"}
    grid = LocalGrid(app_of(keys), dict(NODES))
    strategy = WeightedStrategy()

    def restart(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            grid.nodes.pop(2)
            grid.nodes[9] = NODES[2]
        return MetricRecord()

    strategy.start(grid, initial(), num_rounds=2, evaluate_fn=restart)
    assert [sorted(weights) for weights in strategy.weights] == [["ann", "bob", "cat"]] * 2


def test_the_mod_reports_what_rules_need() -> None:
    """An evaluation that reads the model's value, so that before and after differ."""

    def evaluate(arrays: ArrayRecord, context: Context) -> tuple[float, float]:
        value = float(arrays["b"].numpy()[0])
        return 10 - value, value / 10

    app = ClientApp(mods=[])
    quiet = MetricRecord({"num-examples": 10})

    def silent(message: Message, context: Context) -> Message:
        reply = ordinary(message, context)
        reply.content = RecordDict({"arrays": reply.content["arrays"], "metrics": MetricRecord(dict(quiet))})
        return reply

    app.train(mods=[report_metrics_mod(evaluate)])(silent)
    seen: list[dict[str, Any]] = []

    def spoil(reply: Message, node: int) -> Message | None:
        if not reply.has_error():
            seen.append(dict(reply.content["metrics"]))
        return reply

    strategy = WeightedStrategy(fu.fedfa(), fraction_evaluate=0.0)
    start(strategy, LocalGrid(app, NODES, spoil), rounds=1)
    assert strategy.failures.as_dict() == {}
    assert [entry["start_loss"] for entry in seen] == [10, 10, 10]
    assert "loss" not in seen[0]
    assert sorted(entry["accuracy"] for entry in seen) == pytest.approx([0.05, 0.1, 0.2])


def test_a_model_without_arrays_is_refused() -> None:
    with pytest.raises(InputError, match="arrays are empty"):
        WeightedStrategy().start(LocalGrid(app_of(), NODES), ArrayRecord({}), num_rounds=1, train_config=ConfigRecord())


def test_other_byte_orders_are_read() -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type == "train":
            reply.content = changed(reply, b=reply.content.array_records["arrays"]["b"].numpy().astype(">f4"))
        return reply

    strategy = WeightedStrategy()
    assert trained(start(strategy, LocalGrid(app_of(), NODES, spoil), rounds=1)) == pytest.approx(90 / 80)
    assert strategy.failures.as_dict() == {}


def test_a_client_that_joins_late_does_not_mix_up_what_is_remembered() -> None:
    """Node 1 answers from round 2 on; node 3 is absent in it and remembered: its move was 2."""

    def spoil(reply: Message, node: int) -> Message | None:
        silent = {0: 1, 1: 3}.get(len(strategy.weights))
        return None if node == silent and reply.metadata.message_type == "train" else reply

    strategy = WeightedStrategy(fu.uniform(), absent="remember")
    result = start(strategy, LocalGrid(app_of(), NODES, spoil))
    first = (1 + 2) / 2
    assert trained(result) == pytest.approx(first + (0.5 * (1 - first) + 0.5 * (2 - first) + 2) / 3)


def test_a_client_that_is_back_before_its_old_node_is_gone() -> None:
    """The old node is listed for a while; the new one counts once it has left, and only once."""
    grid = LocalGrid(app_of({1: "ann", 2: "bob", 3: "cat", 9: "bob"}), dict(NODES))
    strategy = WeightedStrategy()

    def restart(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            grid.nodes[9] = NODES[2]
        if server_round == 2:
            grid.nodes.pop(2)
        return MetricRecord()

    strategy.start(grid, initial(), num_rounds=3, evaluate_fn=restart)
    assert [sorted(weights) for weights in strategy.weights] == [["ann", "bob", "cat"]] * 3
    assert strategy.failures.as_dict() == {"node:9": {"rejected": 1}}


def test_a_rule_sees_the_updates_that_are_remembered() -> None:
    """Node 3 answers in the first round only; what it sent then enters the second, and the rule is shown it."""
    entering: list[list[str]] = []

    @fu.rule()
    def looks(report: Any, state: Any) -> Any:
        entering.append(sorted(report.client_ids[k] for k in report.entering.clients.tolist()))
        return report.num_examples / report.num_examples.sum(), state

    def spoil(reply: Message, node: int) -> Message | None:
        return None if node == 3 and reply.metadata.message_type == "train" and strategy.weights else reply

    strategy = WeightedStrategy(looks, absent="remember")
    start(strategy, LocalGrid(app_of(), NODES, spoil))
    assert entering == [["node:1", "node:2", "node:3"]] * 2


def test_counters_are_averaged_as_the_model_is_and_stay() -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type != "train":
            return reply
        if strategy.weights:
            return None
        wrong = {"b": np.full(3, np.nan, dtype=np.float32)} if node == 2 else {}
        reply.content = changed(reply, count=np.array([node]), **wrong)
        return reply

    strategy = WeightedStrategy(fu.dr(q=0), absent="drop")
    result = start(strategy, LocalGrid(app_of(), NODES, spoil))
    assert result.arrays["count"].numpy().tolist() == pytest.approx([(1 * 1 + 3 * 4) / 5])


def test_a_rule_that_fails_has_its_round_skipped(caplog: pytest.LogCaptureFixture) -> None:
    @fu.rule()
    def breaks(report: Any, state: Any) -> Any:
        share = torch.ones(len(report.client_ids), dtype=torch.float64) / len(report.client_ids)
        return share * (2 if report.round == 0 else 1), state

    strategy = WeightedStrategy(breaks)
    result = start(strategy, LocalGrid(app_of(), NODES), rounds=2)
    assert "round 0 is skipped" in caplog.text
    assert strategy.weights[0] == {}
    assert trained(result) == pytest.approx(7 / 6)


def test_a_second_start_begins_anew() -> None:
    strategy = WeightedStrategy(server=fu.server.momentum(0.5))
    first, second = (trained(start(strategy, LocalGrid(app_of(), NODES))) for _ in range(2))
    assert first == second
    assert len(strategy.weights) == 2


def test_learned_weights_bring_what_they_were_learned_for() -> None:
    env = fu.environment("digits-label-skew").replace(rounds=2)
    how = fu.Learning(iterations=1, step_sizes="learned")
    learned = fu.learn_weights(env, algorithm=fu.Algorithm(absent="remember"), learning=how)
    strategy = WeightedStrategy(learned)
    assert strategy.algorithm.absent == "remember"
    assert len(strategy.algorithm.step_sizes) == 2
    assert WeightedStrategy(learned, absent="drop").algorithm.absent == "drop"
    with pytest.raises(InputError, match="learned for 2 rounds"):
        start(strategy, LocalGrid(app_of(), NODES), rounds=3)


def test_buffers_go_to_the_end_and_come_back_in_their_place() -> None:
    parts = {
        "norm.running_mean": np.array([1.0, 2.0], np.float32),
        "norm.num_batches_tracked": np.array(7),
        "linear.weight": np.array([[3.0, 4.0, 5.0]], np.float32),
    }
    record = ArrayRecord({name: Array(values) for name, values in parts.items()})
    layout = RecordLayout.of(record)
    model = layout.read(record)
    flat = model.vector
    assert flat.tolist() == [3.0, 4.0, 5.0, 1.0, 2.0]
    assert (layout.params.names, layout.params.buffer_names) == (("linear.weight",), ("norm.running_mean",))
    assert layout.params.buffers(flat).tolist() == [1.0, 2.0]
    back = layout.record(flat, model.counters, model.types)
    assert list(back) == list(parts)
    for name, values in parts.items():
        assert np.array_equal(back[name].numpy(), values)


MANY: dict[int, dict[str, Any]] = {node: {"pull": 2.0, "n": 10} for node in range(1, 6)} | {6: {"pull": 900.0, "n": 10}}


@pytest.mark.parametrize("settings", [{"filter": "norm"}, {"aggregator": fu.median()}, {"aggregator": fu.krum()}])
def test_one_that_pulls_far_away_is_held_off(settings: Any) -> None:
    strategy = WeightedStrategy(fu.uniform(), **settings)
    result = start(strategy, LocalGrid(app_of(), MANY), rounds=1)
    assert trained(result) == pytest.approx(1)
    assert strategy.failures.as_dict() == ({"node:6": {"rejected": 1}} if "filter" in settings else {})
    assert trained(start(WeightedStrategy(fu.uniform()), LocalGrid(app_of(), MANY), rounds=1)) > 50


# --- what FedAvg takes -------------------------------------------------------------------------------------

ARRAYS: dict[str, np.ndarray] = {
    "float64": np.linspace(-3, 5, 6).reshape(2, 3),
    "columns first": np.asfortranarray(np.linspace(-3, 5, 6).reshape(2, 3)),
    "float32": np.linspace(-3, 5, 6, dtype=np.float32),
    "scalar": np.array(2.5, dtype=np.float32),
    "num_batches_tracked": np.array(7),
    "whole": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "flags": np.array([True, False]),
    "norm.running_var": np.array([900.0, 1e-3], dtype=np.float32),
    "swapped": np.arange(3).astype(">f4"),
}


def drifting(message: Message, context: Context) -> Message:
    """Every client sends what it got, scaled by its own factor; whole numbers stay whole, columns first."""
    sent, factor = message.content.array_records["arrays"], int(context.node_config["n"]) // 10
    moved = {}
    for name, array in sent.items():
        values = array.numpy() * factor + np.asarray(factor).astype(array.numpy().dtype)
        whole = ARRAYS[name].dtype.kind in "iu"
        moved[name] = Array(np.asfortranarray(values.astype(np.int64) if whole else values).reshape(values.shape))
    metrics = MetricRecord({"num-examples": int(context.node_config["n"]), "loss": [float(factor), 1.0]})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("names", [list(ARRAYS), ["float32", "num_batches_tracked"], ["whole"], ["float32"]], ids=str)
def test_layouts_and_types_are_fedavgs(names: list[str]) -> None:
    start_from = ArrayRecord({name: Array(ARRAYS[name]) for name in names})
    results = []
    for strategy in (WeightedStrategy(), FedAvg()):
        grid = LocalGrid(app_of(train=drifting), NODES)
        results.append(strategy.start(grid, start_from, num_rounds=2))
    ours, theirs = results
    assert list(ours.arrays) == list(theirs.arrays)
    for name in names:
        found, expected = ours.arrays[name].numpy(), theirs.arrays[name].numpy()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_half_precision_is_given_back() -> None:
    start_from = ArrayRecord({"w": Array(np.linspace(0, 1, 4, dtype=np.float16))})
    found = [s.start(LocalGrid(app_of(), NODES), start_from, num_rounds=1) for s in (WeightedStrategy(), FedAvg())]
    ours, theirs = (result.arrays["w"].numpy() for result in found)
    assert ours.dtype == theirs.dtype == np.float16
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


# --- clients that register, or do not ----------------------------------------------------------------------


def test_ordinary_clients_get_fedavgs_messages_only() -> None:
    grid = LocalGrid(app_of(), NODES)
    start(WeightedStrategy(fu.fedadp()), grid)
    assert {message.metadata.message_type for message in grid.sent} == {"train", "evaluate"}


@pytest.mark.parametrize("absent", ["drop", "remember"])
def test_a_client_that_registers_late_counts_from_the_first_round_on(absent: Any) -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if node == 2 and reply.metadata.message_type == "train" and not strategy.weights:
            reply.content = RecordDict({key: reply.content[key] for key in ("arrays", "metrics")})
        return reply

    strategy = WeightedStrategy(absent=absent)
    grid = LocalGrid(app_of({1: "ann", 2: "bob", 3: "cat"}), NODES, spoil)
    ours, theirs = start(strategy, grid, 3), start(FedAvg(), LocalGrid(app_of(), NODES), 3)
    assert trained(ours) == pytest.approx(trained(theirs), rel=1e-6)
    assert [sorted(weights) for weights in strategy.weights] == [["ann", "cat", "node:2"]] + [["ann", "bob", "cat"]] * 2
    assert strategy.failures.as_dict() == {}


def test_what_a_rule_knows_of_a_client_stays_when_it_registers_late() -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if node == 2 and reply.metadata.message_type == "train" and len(strategy.weights) < 2:
            reply.content = RecordDict({key: reply.content[key] for key in ("arrays", "metrics")})
        return reply

    strategy = WeightedStrategy(fu.pretrained())
    start(strategy, LocalGrid(app_of({1: "ann", 2: "bob", 3: "cat"}), NODES, spoil), 4)
    assert strategy._run is not None
    seen = strategy._run.rule_state["seen"]
    assert {name: own[:2] for name, own in seen.items()} == {key: [4, 3] for key in ("ann", "bob", "cat")}


def test_a_client_that_never_answers_and_one_that_is_late() -> None:
    """Node 3 never answers; node 1 not in time in the first round. FedAvg goes on without them, and so do we."""
    found = []
    for strategy in (WeightedStrategy(), FedAvg()):
        seen: list[int] = []

        def spoil(reply: Message, node: int, seen: list[int] = seen) -> Message | None:
            if reply.metadata.message_type != "train":
                return reply
            seen.append(node)
            return None if node == 3 or (node == 1 and seen.count(1) == 1) else reply

        found.append(start(strategy, LocalGrid(app_of(), NODES, spoil), 3))
    ours, theirs = found
    assert trained(ours) == pytest.approx(trained(theirs), rel=1e-6)
    assert dict(ours.evaluate_metrics_clientapp[3]) == pytest.approx(dict(theirs.evaluate_metrics_clientapp[3]))


def test_inflated_counts_are_capped() -> None:
    def spoil(reply: Message, node: int) -> Message | None:
        if node == 3 and reply.metadata.message_type == "train":
            reply.content.metric_records["metrics"]["num-examples"] = 10**6
        return reply

    strategy = WeightedStrategy(max_examples_ratio=10)
    start(strategy, LocalGrid(app_of(), NODES, spoil), rounds=1)
    assert strategy.weights[0]["node:3"] == pytest.approx(150 / 180)
    with pytest.raises(InputError, match="max_examples_ratio >= 1, not 0"):
        WeightedStrategy(max_examples_ratio=0)


def test_metrics_that_a_rule_can_do_without() -> None:
    seen: list[Any] = []

    @fu.rule(optional=["start_loss", "accuracy"])
    def looks(report: Any, state: Any) -> Any:
        seen.append((report.metrics.start_loss, report.metrics.accuracy))
        return report.num_examples / report.num_examples.sum(), state

    strategy = WeightedStrategy(looks)
    start(strategy, LocalGrid(app_of(), NODES), rounds=1)
    assert strategy.failures.as_dict() == {}
    assert seen[0][0].isnan().all()
    assert sorted(seen[0][1].tolist()) == pytest.approx([0.25, 0.5, 1])

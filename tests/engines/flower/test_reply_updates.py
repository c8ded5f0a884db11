"""Updates read off the replies are those of a stack of them, and are neither stacked nor read more than need be."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedunfold as fu
from fedunfold.aggregation.absent import RememberedUpdates
from fedunfold.aggregation.screening import usable_ones
from fedunfold.core.errors import FederationError
from fedunfold.core.messages import OpenUpdates
from fedunfold.core.update_parts import PART
from fedunfold.engines.flower import WeightedStrategy, reply_updates, server_step
from fedunfold.engines.flower.reply_updates import ReplyUpdates, UnusableReplies
from fedunfold.rules import sketch
from tests.engines.flower.test_strategy import ARRAYS, NODES, app_of, drifting
from tests.support.grid import LocalGrid

SIZES = (5, 1, 700, 300)
"""Arrays shorter and longer than a block."""


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[ReplyUpdates, OpenUpdates]:
    """The same updates of clients 1, 2 and 4, read off and stacked; the last 300 entries are buffers."""
    monkeypatch.setattr(reply_updates, "PART", 3 * 256)
    monkeypatch.setattr(reply_updates, "PIECE", 100)
    random = np.random.default_rng(0)
    replies = [[random.normal(size=size).astype(request.param) for size in SIZES] for _ in range(3)]
    model = torch.from_numpy(random.normal(size=sum(SIZES)).astype(request.param))
    rows = torch.stack([torch.from_numpy(np.concatenate(reply)) - model for reply in replies])
    norms = rows[:, : -SIZES[-1]].norm(dim=1).double()
    clients = torch.tensor([1, 2, 4])
    return ReplyUpdates(clients, replies, model, sum(SIZES[:-1])), OpenUpdates(clients, rows, norms)


@pytest.mark.parametrize("stacked_before", [False, True])
def test_they_are_those_of_a_stack(stacked_before: bool, pair: tuple[ReplyUpdates, OpenUpdates]) -> None:
    lazy, stacked = pair
    if stacked_before:
        assert torch.equal(lazy.rows, stacked.rows)
    coefficients = torch.tensor([9.0, 0.2, 0.3, 9.0, 0.5], dtype=torch.float64)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    found, expected = (updates.weighted_sum(coefficients) for updates in pair)
    torch.testing.assert_close(found.total, expected.total, **close)
    torch.testing.assert_close(lazy.norms, stacked.norms, rtol=1e-6, atol=0)
    vector = lazy.model + 1
    torch.testing.assert_close(found.inner_products(vector), expected.inner_products(vector), **close)
    assert all(map(torch.equal, lazy.copies(), stacked.copies()))
    some = torch.tensor([True, False, True])
    left, expected_left = lazy.select(some), stacked.select(some)
    assert left.clients.tolist() == [1, 4]
    assert torch.equal(left.rows, expected_left.rows)
    assert usable_ones(lazy).tolist() == usable_ones(stacked).tolist() == [True] * 3
    assert ("rows" in vars(lazy)) == stacked_before


def test_nobody() -> None:
    nobody = ReplyUpdates(torch.zeros(0, dtype=torch.long), [], torch.ones(3), 3)
    assert nobody.rows.shape == (0, 3)
    assert nobody.weighted_sum(torch.ones(2)).total.tolist() == [0, 0, 0]
    assert nobody.copies() == []


def test_a_model_moved_in_place_is_the_sum_added(pair: tuple[ReplyUpdates, OpenUpdates]) -> None:
    lazy, stacked = pair
    coefficients = torch.tensor([9.0, 0.2, 0.3, 9.0, 0.5], dtype=torch.float64)
    expected = lazy.model + stacked.weighted_sum(coefficients).total
    assert lazy.move_model(coefficients)
    torch.testing.assert_close(lazy.model, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lazy.norms, stacked.norms, rtol=1e-6, atol=0)


def test_a_model_that_would_not_be_finite_stays() -> None:
    updates = ReplyUpdates(torch.arange(1), [[np.full(2, 1e18, np.float32)]], torch.ones(2), 2)
    assert not updates.move_model(torch.tensor([1e30]))
    assert updates.model.tolist() == [1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("at", [0, 3], ids=["a parameter", "a buffer"])
def test_what_cannot_be_added_up_is_noticed(bad: float, at: int) -> None:
    replies = [[np.ones(size, np.float32) for size in SIZES] for _ in range(3)]
    replies[1][at][:] = bad
    for asked in ("norms", "rows", "weighted_sum", "move_model"):
        updates = ReplyUpdates(torch.tensor([1, 3, 5]), replies, torch.zeros(sum(SIZES)), sum(SIZES[:-1]))
        with pytest.raises(UnusableReplies) as found:
            _ = getattr(updates, asked)(torch.ones(6)) if "_" in asked else getattr(updates, asked)
        assert found.value.clients == [3]
        assert not updates.model.any()


# --- in a strategy -----------------------------------------------------------------------------------------

CLIENTS, ENTRIES = 8, 2**18
CONFIG = ConfigRecord()


def replies_to(messages: Sequence[Message]) -> list[Message]:
    found = []
    for message in messages:
        node = message.metadata.dst_node_id
        random = np.random.default_rng(node)
        arrays = {name: Array(random.normal(size=ENTRIES // 4).astype(np.float32)) for name in "abcd"}
        metrics = MetricRecord({"num-examples": 10 * node, "loss": 0.1 * node, "accuracy": 0.5})
        reply = Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        found.append(reply)
    return found


def refuse_to_stack(_: object) -> torch.Tensor:
    raise AssertionError("somebody has asked for a stack of all updates")


def aggregated(strategy: FedAvg, *, stacked: bool = False) -> tuple[ArrayRecord, int]:
    """The model of one round, and how much numpy had allocated at most while it was made."""
    if stacked:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(server_step, "ReplyUpdates", AsAStack)
            return aggregated(strategy)
    grid = LocalGrid(app_of(), {node: {} for node in range(1, CLIENTS + 1)})
    begin = ArrayRecord({name: Array(np.ones(ENTRIES // 4, np.float32)) for name in "abcd"})
    replies = replies_to(list(strategy.configure_train(1, begin, CONFIG, grid)))
    tracemalloc.start()
    arrays, _ = strategy.aggregate_train(1, replies)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert arrays is not None
    return arrays, most


class AsAStack:
    """The same updates in a matrix."""

    def __new__(cls, clients: torch.Tensor, replies: Any, model: torch.Tensor, num_params: int) -> Any:
        found = ReplyUpdates(clients, replies, model, num_params)
        return OpenUpdates(clients, found.rows, found.norms)


@pytest.mark.parametrize("rule", [fu.size(), fu.dr(), fu.fedfa()], ids=lambda rule: rule.name)
def test_rules_that_read_numbers_alone_stack_nothing(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplyUpdates, "rows", property(refuse_to_stack))
    ours, most = aggregated(WeightedStrategy(rule))
    theirs, fedavgs = aggregated(FedAvg())
    assert most < 1.2 * fedavgs + 4 * PART * 4
    if rule.name == "size":
        for name in theirs:
            np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("few", [10**6, 10**9], ids=["sketches", "exact products"])
@pytest.mark.parametrize("absent", ["drop", "remember"])
def test_a_pretrained_rule_stacks_nothing_either(absent: Any, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what is remembered; and it decides as over a stack."""
    monkeypatch.setattr(sketch, "EXACT_PRODUCTS", few)
    expected, _ = aggregated(WeightedStrategy(fu.pretrained(), absent=absent), stacked=True)
    for kind in (ReplyUpdates, RememberedUpdates):
        monkeypatch.setattr(kind, "rows", property(refuse_to_stack))
    found, _ = aggregated(WeightedStrategy(fu.pretrained(), absent=absent))
    for name in expected:
        np.testing.assert_allclose(found[name].numpy(), expected[name].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"rule": fu.fedadp()}, {"aggregator": fu.median()}], ids=["fedadp", "median"])
def test_others_have_one_copy_of_the_replies(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = np.empty

    def noted(shape: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(shape, *args, **kwargs)
        made.append(found.nbytes)
        return found

    monkeypatch.setattr(np, "empty", noted)
    aggregated(WeightedStrategy(**settings))
    assert [size for size in made if size >= CLIENTS * ENTRIES * 4] == [CLIENTS * ENTRIES * 4]


@pytest.mark.parametrize(("filter", "passes"), [("finite", 1), ("norm", 2)])
def test_replies_are_read_once(filter: Any, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is screened by its norm beside the others' is read a second time for the sum."""
    begun: list[int] = []
    original = ReplyUpdates._aligned

    def noted(self: ReplyUpdates, longest: int, *totals: Any) -> Any:
        begun.append(longest)
        return original(self, longest, *totals)

    monkeypatch.setattr(ReplyUpdates, "_aligned", noted)
    aggregated(WeightedStrategy(filter=filter))
    assert begun == [reply_updates.PIECE] * passes


def test_the_short_way_to_a_mean_is_the_long_one() -> None:
    """Rules that read numbers alone need no vector but the next model; buffers, counters and bad replies included."""

    @fu.rule()
    def long(report: Any, state: Any) -> Any:
        return report.num_examples.double() / report.num_examples.sum(), state

    def spoil(reply: Message, node: int) -> Message | None:
        if reply.metadata.message_type == "train" and node == 2:
            arrays = dict(reply.content.array_records["arrays"].items())
            arrays["float32"] = Array(np.full(6, np.nan, np.float32))
            reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    names = ("float32", "scalar", "num_batches_tracked", "norm.running_var")
    begin = ArrayRecord({name: Array(ARRAYS[name]) for name in names})
    found = []
    for rule in (fu.size(), long):
        strategy = WeightedStrategy(rule)
        found.append(strategy.start(LocalGrid(app_of(train=drifting), NODES, spoil), begin, num_rounds=2).arrays)
        assert strategy.failures.as_dict() == {"node:2": {"rejected": 2}}
        assert strategy._run is not None
        assert (strategy._run.server.direction is None) == (rule is not long)
    short, general = found
    for name in names:
        np.testing.assert_allclose(short[name].numpy(), general[name].numpy(), rtol=1e-6, atol=1e-6)


def test_updates_too_large_to_be_measured_train_nothing() -> None:
    def huge(message: Message, context: Any) -> Message:
        arrays = ArrayRecord({"w": Array(np.full(2, 1e19, np.float32))})
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    begin = ArrayRecord({"w": Array(np.full(2, 3.3e38, np.float32))})
    with pytest.raises(FederationError, match="has a NaN, infinite or far too large value"):
        WeightedStrategy().start(LocalGrid(app_of(train=huge), NODES), begin, num_rounds=1)

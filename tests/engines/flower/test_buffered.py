"""A Flower server that does not wait for slow clients, counted by a clock that only waiting moves."""

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedunfold as fu
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.engines.flower import BufferedStrategy, WeightedStrategy
from tests.support.grid import LocalGrid

SECONDS = {1: 1.0, 2: 3.0, 3: 10.0}
"""As in `tests.core.test_timetable`."""


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)


class SlowGrid(LocalGrid):
    """Replies of a node come so many seconds after it was sent something."""

    def __init__(self, app: ClientApp, clock: Clock, seconds: dict[int, float]) -> None:
        super().__init__(app, {node: {} for node in seconds})
        self.clock, self.seconds = clock, seconds
        self.due: dict[str, float] = {}
        self.trained: defaultdict[int, list[int]] = defaultdict(list)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.trained[node].append(int(message.content.config_records["config"]["server-round"]))  # type: ignore
            (id,) = super().push_messages([message])
            self.due[id] = self.clock.now + self.seconds[node]
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages([id for id in message_ids if self.due[id] <= self.clock.now + 1e-9])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(
        "fedunfold.engines.flower.buffered.time", SimpleNamespace(monotonic=found.monotonic, sleep=found.sleep)
    )
    return found


def train(message: Message, context: Context) -> Message:
    """Halfway from where it starts to the node's own number."""
    arrays = message.content.array_records["arrays"]
    moved = {name: Array(a + np.float32(0.5) * (context.node_id - a)) for name, a in numpy_of(arrays).items()}
    metrics = MetricRecord({"num-examples": 10 * context.node_id})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


def numpy_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def app(handler: Any = train) -> ClientApp:
    made = ClientApp()
    made.train()(handler)
    return made


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})


def test_four_steps_by_hand(clock: Clock) -> None:
    """The third client's update of the first model enters the fourth step, three steps old."""
    grid, times, seen = SlowGrid(app(), clock, SECONDS), [], []
    discount = fu.fedbuff()

    def weigh(report: ClientUpdates, state: Any) -> Any:
        seen.append(
            {} if report.staleness is None else dict(zip(report.client_ids, report.staleness.tolist(), strict=True))
        )
        return discount(report, state)

    def test(step: int, arrays: ArrayRecord) -> None:
        times.append(clock.now)

    strategy = BufferedStrategy(weigh, buffer=2)
    result = strategy.start(grid, initial(), num_rounds=4, evaluate_fn=test)
    assert times == pytest.approx([0, 3, 6, 9, 10], abs=0.11 * 5)
    models = [0.0]
    for pair in (((1, 0), (2, 0)), ((1, 1), (2, 1)), ((1, 2), (2, 2)), ((1, 3), (3, 0))):
        late = len(models) - 1
        steps = [0.5 * (node - models[t]) / 2 / (1 + late - t) ** 0.5 for node, t in pair]
        models.append(models[-1] + sum(steps))
    assert numpy_of(result.arrays)["w"] == pytest.approx([models[-1]] * 2)
    assert seen[3] == {"node:1": 0, "node:2": 0, "node:3": 3}
    assert grid.trained[3] == [1]


def test_equal_to_synchronous_rounds_where_all_are_waited_for(clock: Clock) -> None:
    buffered = BufferedStrategy(fu.size(), buffer=3).start(SlowGrid(app(), clock, SECONDS), initial(), num_rounds=3)
    waiting = WeightedStrategy(fu.size(), fraction_evaluate=0.0)
    grid = LocalGrid(app(), {node: {} for node in SECONDS})
    expected = waiting.start(grid, initial(), num_rounds=3)
    assert numpy_of(buffered.arrays)["w"] == pytest.approx(numpy_of(expected.arrays)["w"])


def test_concurrency_is_kept(clock: Clock) -> None:
    grid = SlowGrid(app(), clock, dict.fromkeys(range(1, 7), 1.0))
    strategy = BufferedStrategy(buffer=2, concurrency=2)
    strategy.start(grid, initial(), num_rounds=3)
    assert sum(map(len, grid.trained.values())) == 6


def test_clients_that_fail_are_counted_and_others_take_their_place(clock: Clock) -> None:
    def failing(message: Message, context: Context) -> Message:
        if context.node_id == 1:
            return Message(Error(1, "no disk"), reply_to=message)
        return train(message, context)

    strategy = BufferedStrategy(buffer=2)
    strategy.start(SlowGrid(app(failing), clock, {1: 0.5, 2: 1.5, 3: 2.0}), initial(), num_rounds=2)
    assert strategy.failures.as_dict()["node:1"] == {"failed": 2}  # once a step
    assert all(set(row) == {"node:2", "node:3"} for row in strategy.weights)


def test_arrays_of_another_shape_are_rejected_also_where_they_are_late(clock: Clock) -> None:
    def strange(message: Message, context: Context) -> Message:
        if context.node_id != 3:
            return train(message, context)
        metrics = MetricRecord({"num-examples": 1})
        arrays = ArrayRecord({"w": Array(np.zeros(5, dtype=np.float32))})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    strategy = BufferedStrategy(buffer=2)
    strategy.start(SlowGrid(app(strange), clock, SECONDS), initial(), num_rounds=4)
    assert strategy.failures.as_dict() == {"node:3": {"rejected": 1}}


def test_too_few_clients_are_an_error_and_no_endless_wait(clock: Clock) -> None:
    strategy = BufferedStrategy(buffer=4)
    with pytest.raises(FederationError, match=r"step 1: 3 of the 4 updates .* and no more in 60 s"):
        strategy.start(SlowGrid(app(), clock, SECONDS), initial(), timeout=60)


def test_a_client_that_does_not_answer_is_let_go_of(clock: Clock) -> None:
    strategy = BufferedStrategy(buffer=1)
    strategy.start(SlowGrid(app(), clock, {1: 5.0, 2: 1e9}), initial(), num_rounds=20, timeout=60)
    assert strategy.failures.as_dict()["node:2"]["no answer"] >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer": 0}, "a buffer of at least 1"),
        ({"concurrency": 0}, "a concurrency of at least 1"),
        ({"fraction_evaluate": 0.5}, "test models by evaluate_fn"),
        ({"checkpoint": "run.safetensors"}, "resumes no run"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BufferedStrategy(**settings)


def test_its_loop_is_its_own(clock: Clock) -> None:
    with pytest.raises(InputError, match=r"call its start\(\)"):
        BufferedStrategy().configure_train(1, initial(), ConfigRecord(), SlowGrid(app(), clock, SECONDS))

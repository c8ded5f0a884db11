"""Nodes that hold a reply back are nudged, and slow ones are not: counted by a clock that only waiting moves."""

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedunfold.core.algorithm import Algorithm
from fedunfold.engines.flower import client_app, client_from_environment, federation_from_environment
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny
from tests.support.grid import LocalGrid

SLOW = 101
ROUNDS = 10


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedGrid(LocalGrid):
    """Every node does one thing after the other: what is sent takes `seconds(node, type, how many before)`."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]], clock: Clock, seconds: Any) -> None:
        super().__init__(app, nodes)
        self.clock, self.seconds = clock, seconds
        self.free_at: dict[int, float] = defaultdict(float)
        self.due: dict[str, float] = {}
        self.counts: dict[tuple[int, str], int] = defaultdict(int)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            (id,) = super().push_messages([message])
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            begin = max(self.clock.now, self.free_at[node])
            self.due[id] = self.free_at[node] = begin + self.seconds(node, kind, self.counts[node, kind])
            self.counts[node, kind] += 1
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages([id for id in message_ids if self.due[id] <= self.clock.now])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    fake = SimpleNamespace(monotonic=found.monotonic, sleep=found.sleep)
    monkeypatch.setattr("fedunfold.engines.flower.transport.time", fake)
    return found


def timed(clock: Clock, seconds: Any) -> TimedGrid:
    env = tiny()
    app = client_app(lambda context: client_from_environment(env, context))
    return TimedGrid(app, {100 + k: {"client-id": key} for k, key in enumerate("abc")}, clock, seconds)


@pytest.mark.parametrize("slow_rounds", [1, ROUNDS], ids=["once", "always"])
def test_a_slow_client_is_not_nudged(slow_rounds: int, clock: Clock) -> None:
    """It takes 25 s to train, and a second for anything else; nudging it would add to what it has to do."""

    def seconds(node: int, kind: str, before: int) -> float:
        return 25.0 if node == SLOW and kind == "train" and before < slow_rounds else 1.0

    grid = timed(clock, seconds)
    remote = federation_from_environment(grid, tiny())
    (result,) = run_rounds(remote, size(), ROUNDS, algorithm=Algorithm(absent="drop"))
    assert result.participated.all()
    assert {node: grid.counts[node, "query.register"] for node in grid.nodes} == dict.fromkeys(grid.nodes, 1)
    assert clock.now < 25 * slow_rounds + 4 * ROUNDS + 10


def test_a_client_that_is_slow_to_register_is_nudged_no_more_than_that(clock: Clock) -> None:
    """It is sent `register` again after 20 s; then it answers both, which is waited for and settles it."""

    def seconds(node: int, kind: str, before: int) -> float:
        return 25.0 if node == SLOW and (kind, before) in {("query.register", 0), ("train", 3)} else 1.0

    grid = timed(clock, seconds)
    remote = federation_from_environment(grid, tiny())
    (result,) = run_rounds(remote, size(), ROUNDS, algorithm=Algorithm(absent="drop"))
    assert result.participated.all()
    assert grid.counts[SLOW, "query.register"] == 2


class OneBehind(TimedGrid):
    """Node 101 gives each reply only when the next message reaches it."""

    held: str | None = None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            (id,) = super().push_messages([message])
            ids.append(id)
            if message.metadata.dst_node_id == SLOW:
                if self.held is not None:
                    self.due[self.held] = self.clock.now
                self.held, self.due[id] = id, float("inf")
        return ids


def test_a_node_that_is_behind_is_waited_for_once(clock: Clock) -> None:
    """From then on a nudge goes with every message, so that nobody waits 20 s for it in each round."""
    found = timed(clock, lambda *_: 1.0)
    grid = OneBehind(found.app, found.nodes, clock, found.seconds)
    remote = federation_from_environment(grid, tiny())
    registered = clock.now
    (result,) = run_rounds(remote, size(), ROUNDS)
    assert result.participated.all()
    assert result.scores == run_rounds(simulated(tiny()), size(), ROUNDS)[0].scores
    assert clock.now - registered < 10 + 6 * ROUNDS
    assert {grid.counts[node, "query.register"] for node in grid.nodes if node != SLOW} == {1}


def test_a_client_that_does_not_answer_is_left_alone(clock: Clock) -> None:
    grid = timed(clock, lambda node, kind, before: 1e9 if node == SLOW and kind == "train" else 1.0)
    transport = FlowerTransport(grid, list("abc"), timeout=60)
    remote_messages = grid.counts[SLOW, "query.register"]
    federation = federation_from_environment(grid, tiny(), timeout=60)
    (result,) = run_rounds(federation, size(), 3, algorithm=Algorithm(absent="drop"))
    assert not result.participated[:, 1].any()
    assert grid.counts[SLOW, "query.register"] == remote_messages + 1
    assert len(transport.registrations()) == 3

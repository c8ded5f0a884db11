"""Over Flower's records: the same numbers, client ids instead of node ids, and clients that come and go."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower import client_app, client_from_environment, federation_from_environment
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.engines.flower.wire import read_registration
from fedunfold.local import nova
from fedunfold.rules import fedfa, size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from tests.support.federations import simulated, tiny
from tests.support.grid import LocalGrid, Spoil


def local(env: Environment, spoil: Spoil | None = None, dtype: torch.dtype = torch.float64) -> LocalGrid:
    app = client_app(lambda context: client_from_environment(env, context, dtype))
    return LocalGrid(app, {100 + k: {"client-id": key} for k, key in enumerate(env.load().keys)}, spoil)


def test_a_run_over_flower_is_the_simulated_one() -> None:
    env = tiny(participation_probability=0.6, seed=3)
    algorithm = Algorithm(nova(), absent="remember")
    here = run_rounds(simulated(env), fedfa(), 3, algorithm=algorithm)[0]
    there = run_rounds(
        federation_from_environment(local(env), env, dtype=torch.float64), fedfa(), 3, algorithm=algorithm
    )[0]
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)
    assert there.scores == here.scores


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_learning_over_flower_is_the_simulated_one(adjoint: Any, dtype: torch.dtype, tolerance: float) -> None:
    env = tiny(participation_probability=0.6, seed=3)
    learning = Learning(iterations=2, adjoint=adjoint, outer="balanced", step_sizes="learned")
    here = learn(simulated(env, dtype=dtype), 3, learning=learning)
    there = learn(federation_from_environment(local(env, dtype=dtype), env, dtype=dtype), 3, learning=learning)
    torch.testing.assert_close(there.weights, here.weights, rtol=tolerance, atol=tolerance)


def test_a_client_that_restarts_under_another_node_id_is_recognised() -> None:
    env = tiny()
    grid = local(env)
    remote = federation_from_environment(grid, env, dtype=torch.float64)

    def come_and_go(t: int, _: object) -> None:
        if t == 0:
            grid.nodes.pop(101)
        if t == 1:
            grid.nodes[999] = {"client-id": "b"}

    (result,) = run_rounds(remote, size(), 3, algorithm=Algorithm(absent="drop"), on_round=come_and_go)
    assert result.participated.tolist() == [[True] * 3, [True, False, True], [True] * 3]
    assert remote.failures.as_dict() == {"b": {"no answer": 1}}


def wrong_keys(reply: Message) -> RecordDict:
    return RecordDict({"something": ArrayRecord(), "metrics": MetricRecord({"outer_loss": 0.0})})


def list_for_a_number(reply: Message) -> RecordDict:
    return RecordDict({"arrays": reply.content["arrays"], "metrics": MetricRecord({"outer_loss": [1.0, 2.0]})})


@pytest.mark.parametrize("content", [wrong_keys, list_for_a_number])
def test_replies_of_another_form_do_not_end_the_run(content: Any) -> None:
    env = tiny()

    def spoil(reply: Message, node: int) -> Message | None:
        if node == 101 and reply.metadata.message_type == "train":
            reply.content = content(reply)
        return reply

    remote = federation_from_environment(local(env, spoil), env, dtype=torch.float64)
    (result,) = run_rounds(remote, size(), 2, algorithm=Algorithm(absent="drop"))
    assert result.participated.tolist() == [[True, False, True]] * 2
    assert remote.failures.as_dict() == {"b": {"failed": 2}}


def test_an_error_of_the_client_is_named(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny()

    def spoil(reply: Message, node: int) -> Message | None:
        if node == 102 and reply.metadata.message_type == "train":
            reply = Message(Error(3, "out of memory"), reply_to=Message(RecordDict(), 102, "train"))
            reply.metadata.__dict__["_src_node_id"] = 102
        return reply

    remote = federation_from_environment(local(env, spoil), env, dtype=torch.float64)
    run_rounds(remote, size(), 1, algorithm=Algorithm(absent="drop"))
    assert "client c: failed (out of memory)" in caplog.text


# --- registering -------------------------------------------------------------------------------------------


def test_two_clients_with_one_id(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny()
    grid = local(env)
    grid.nodes[200] = {"client-id": "b"}
    remote = federation_from_environment(grid, env, dtype=torch.float64)
    assert "a second node registers as client b" in caplog.text
    run_rounds(remote, size(), 1)
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained == [100, 101, 102]


def test_a_client_cannot_grow_by_registering_again() -> None:
    env = tiny()
    grid = local(env)
    transport = FlowerTransport(grid, ["a", "b", "c"])
    before = transport.registrations()
    grid.nodes.pop(101)
    grid.nodes[300] = {"client-id": "b"}
    honest = grid.app

    def inflated(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.register":
            return honest(message, context)
        config = ConfigRecord({"client-id": "b", "label-counts": [10**6, 1, 1], "task": "", "statistics": 0})
        return Message(RecordDict({"config": config}), reply_to=message)

    grid.app = inflated  # type: ignore[assignment]
    transport.send_and_receive("train", {})
    assert transport.registrations() == before


def test_clients_that_do_not_come_are_not_waited_for_in_vain() -> None:
    with pytest.raises(FederationError, match="client 'd' did not register"):
        FlowerTransport(local(tiny()), ["a", "b", "c", "d"], registration_timeout=0.0)


def test_a_client_that_is_back_before_its_old_node_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.engines.flower.transport.RETRY_AFTER", 0.0)
    env = tiny()
    grid = local(env)
    remote = federation_from_environment(grid, env, dtype=torch.float64)

    def restart(t: int, _: object) -> None:
        if t == 0:
            grid.nodes[999] = {"client-id": "b"}
        if t == 1:
            grid.nodes.pop(101)

    (result,) = run_rounds(remote, size(), 3, algorithm=Algorithm(absent="drop"), on_round=restart)
    assert result.participated.all()
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained == [100, 101, 102, 100, 101, 102, 100, 999, 102]


class OneBehind(LocalGrid):
    """Node 101 gives a reply only when it gets the next message, as a SuperNode does that lost its server."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            (id,) = super().push_messages([message])
            ids.append(id)
            if message.metadata.dst_node_id == 101:
                late, self.held = getattr(self, "held", None), self.replies.pop(id)
                if late is not None:
                    self.replies[late.metadata.reply_to_message_id] = late
        return ids


def test_a_node_that_stays_one_reply_behind_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.engines.flower.transport.PING_AFTER", 0.2)
    env = tiny()
    plain = local(env)
    grid = OneBehind(plain.app, plain.nodes)
    remote = federation_from_environment(grid, env, dtype=torch.float64)
    (result,) = run_rounds(remote, size(), 3)
    assert result.participated.all()
    assert remote.failures.as_dict() == {}
    torch.testing.assert_close(result.model, run_rounds(simulated(env), size(), 3)[0].model, rtol=1e-9, atol=1e-12)


def test_a_stranger_is_not_waited_for_instead_of_a_client(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny({"a": 7, "b": 4})
    grid = local(tiny())  # c is somebody else's
    run_rounds(federation_from_environment(grid, env, dtype=torch.float64), size(), 1)
    assert "client c is not one of this federation" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "with the id None"),
        ({"client-id": "a b", "label-counts": [1, 2], "shape:": [4]}, "with the id 'a b'"),
        (
            {"client-id": "a", "label-counts": [1.5, 2.5], "shape:": [4]},
            "label-counts that are no whole numbers",
        ),
        ({"client-id": "a", "label-counts": [-1, 2], "shape:": [4]}, "label-counts that are no whole numbers"),
        ({"client-id": "a", "label-counts": [0, 0], "shape:": [4]}, "registers without samples"),
        (
            {"client-id": "a", "label-counts": [10**12, 0], "shape:": [4]},
            "more than the 1000000000 samples of a client",
        ),
        ({"client-id": "a", "label-counts": [1, 2], "shape:": [0]}, "samples of shape"),
        ({"client-id": "a", "label-counts": [3], "shape:ids": "4"}, "shapes that are no whole numbers"),
        (
            {"client-id": "a", "label-counts": [3], "shape:a": [10**7], "shape:b": [1]},
            "more than the 10000000",
        ),
        ({"client-id": "a", "label-counts": [3], "statistics": 2.5}, "statistics that are no whole numbers"),
        ({"client-id": "a", "label-counts": [3], "statistics": 10**9}, "more than the 1000000 statistics"),
        ({"client-id": "a", "label-counts": [3], "statistics": 1, "held-out": -1}, "held-out that are no whole"),
        ({"client-id": "a", "label-counts": [3], "statistics": 1, "held-out": 10**10}, "too many held-out samples"),
        ({"client-id": "a", "label-counts": [3], "statistics": 1}, "registers the task None"),
        ({"client-id": "a", "label-counts": [3], "statistics": 1, "task": "a\nb"}, "give its name and settings in one"),
    ],
)
def test_registrations_within_bounds(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_registration(RecordDict({"config": ConfigRecord(config)}))


def test_a_node_without_an_id() -> None:
    with pytest.raises(InputError, match="node-config needs client-id="):
        client_from_environment(tiny(), Context(1, 1, {}, RecordDict(), {}))
    with pytest.raises(InputError, match="client 'z' is not in the environment"):
        client_from_environment(tiny(), Context(1, 1, {"client-id": "z"}, RecordDict(), {}))
    assert client_from_environment(tiny(), Context(1, 1, {"partition-id": 2}, RecordDict(), {})).client_id == "c"

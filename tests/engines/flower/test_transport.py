"""Over Flower's records: the same numbers, keys instead of node ids, and clients that come and go."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.engines.flower import client_app, federation, site_of
from fedunfold.engines.flower.transport import FlowerChannel
from fedunfold.engines.flower.wire import read_registration
from fedunfold.local.optimizers import nova
from fedunfold.rules import fedfa, size
from fedunfold.training.loop import Algorithm, run_rounds
from fedunfold.unfolding import Learning, learn
from tests.support.federations import simulated, tiny
from tests.support.grid import LocalGrid, Spoil


def local(env: Environment, spoil: Spoil | None = None, dtype: torch.dtype = torch.float64) -> LocalGrid:
    app = client_app(lambda context: site_of(env, context, dtype))
    return LocalGrid(app, {100 + k: {"key": key} for k, key in enumerate(env.load().keys)}, spoil)


def test_a_run_over_flower_is_the_simulated_one() -> None:
    env = tiny(participation_probability=0.6, seed=3)
    algorithm = Algorithm(nova(), absent="remember")
    here = run_rounds(simulated(env), fedfa(), 3, algorithm=algorithm)
    there = run_rounds(federation(local(env), env, dtype=torch.float64), fedfa(), 3, algorithm=algorithm)
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)
    assert there.accuracies == here.accuracies


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_learning_over_flower_is_the_simulated_one(adjoint: Any, dtype: torch.dtype, tolerance: float) -> None:
    env = tiny(participation_probability=0.6, seed=3)
    learning = Learning(iterations=2, adjoint=adjoint, outer="balanced", step_sizes="learned")
    here = learn(simulated(env, dtype=dtype), 3, learning=learning)
    there = learn(federation(local(env, dtype=dtype), env, dtype=dtype), 3, learning=learning)
    torch.testing.assert_close(there.weights, here.weights, rtol=tolerance, atol=tolerance)


def test_a_client_that_restarts_under_another_id_is_taken_back() -> None:
    env = tiny()
    grid = local(env)
    remote = federation(grid, env, dtype=torch.float64)
    present = []

    def come_and_go(t: int, _: object) -> None:
        if t == 0:
            grid.nodes.pop(101)
        if t == 1:
            grid.nodes[999] = {"key": "b"}

    result = run_rounds(remote, size(), 3, algorithm=Algorithm(absent="drop"), on_round=come_and_go)
    present = result.present.tolist()
    assert present == [[True] * 3, [True, False, True], [True] * 3]
    assert remote.faults.as_dict() == {"b": {"no answer": 1}}


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

    remote = federation(local(env, spoil), env, dtype=torch.float64)
    result = run_rounds(remote, size(), 2, algorithm=Algorithm(absent="drop"))
    assert result.present.tolist() == [[True, False, True]] * 2
    assert remote.faults.as_dict() == {"b": {"failed": 2}}


def test_an_error_of_the_client_is_named(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny()

    def spoil(reply: Message, node: int) -> Message | None:
        if node == 102 and reply.metadata.message_type == "train":
            reply = Message(Error(3, "out of memory"), reply_to=Message(RecordDict(), 102, "train"))
            reply.metadata.__dict__["_src_node_id"] = 102
        return reply

    remote = federation(local(env, spoil), env, dtype=torch.float64)
    run_rounds(remote, size(), 1, algorithm=Algorithm(absent="drop"))
    assert "client c: failed (out of memory)" in caplog.text


# --- registering -------------------------------------------------------------------------------------------


def test_two_clients_with_one_key(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny()
    grid = local(env)
    grid.nodes[200] = {"key": "b"}
    remote = federation(grid, env, dtype=torch.float64)
    assert "a second node registers as client b" in caplog.text
    run_rounds(remote, size(), 1)
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained == [100, 101, 102]


def test_a_client_cannot_grow_by_registering_again() -> None:
    env = tiny()
    grid = local(env)
    channel = FlowerChannel(grid, ["a", "b", "c"])
    before = channel.registrations()
    grid.nodes.pop(101)
    grid.nodes[300] = {"key": "b"}
    honest = grid.app

    def inflated(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.register":
            return honest(message, context)
        config = ConfigRecord({"key": "b", "label-counts": [10**6, 1, 1], "features": [5]})
        return Message(RecordDict({"config": config}), reply_to=message)

    grid.app = inflated  # type: ignore[assignment]
    channel.ask("train", {})
    assert channel.registrations() == before


def test_clients_that_do_not_come_are_not_waited_for_in_vain() -> None:
    with pytest.raises(InputError, match="client 'd' did not register"):
        FlowerChannel(local(tiny()), ["a", "b", "c", "d"], patience=0.0)


def test_a_client_that_is_back_before_its_old_node_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.engines.flower.transport.ASK_AGAIN", 0.0)
    env = tiny()
    grid = local(env)
    remote = federation(grid, env, dtype=torch.float64)

    def restart(t: int, _: object) -> None:
        if t == 0:
            grid.nodes[999] = {"key": "b"}
        if t == 1:
            grid.nodes.pop(101)

    result = run_rounds(remote, size(), 3, algorithm=Algorithm(absent="drop"), on_round=restart)
    assert result.present.all()
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained == [100, 101, 102, 100, 101, 102, 100, 999, 102]


class OneBehind(LocalGrid):
    """Node 101 gives an answer only when it gets the next message, as a SuperNode does that lost its server."""

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


def test_a_node_that_stays_one_answer_behind_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.engines.flower.transport.PING_AFTER", 0.2)
    env = tiny()
    plain = local(env)
    grid = OneBehind(plain.app, plain.nodes)
    remote = federation(grid, env, dtype=torch.float64)
    result = run_rounds(remote, size(), 3)
    assert result.present.all()
    assert remote.faults.as_dict() == {}
    torch.testing.assert_close(result.model, run_rounds(simulated(env), size(), 3).model, rtol=1e-9, atol=1e-12)


def test_a_stranger_is_not_waited_for_instead_of_a_client(caplog: pytest.LogCaptureFixture) -> None:
    env = tiny({"a": 7, "b": 4})
    grid = local(tiny())  # c is somebody else's
    run_rounds(federation(grid, env, dtype=torch.float64), size(), 1)
    assert "client c is not one of this federation" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "with the key None"),
        ({"key": "a b", "label-counts": [1, 2], "features": [4]}, "with the key 'a b'"),
        ({"key": "a", "label-counts": [1.5, 2.5], "features": [4]}, "label-counts that are no whole numbers"),
        ({"key": "a", "label-counts": [-1, 2], "features": [4]}, "label-counts that are no whole numbers"),
        ({"key": "a", "label-counts": [3], "features": [4]}, "1 classes"),
        ({"key": "a", "label-counts": [0, 0], "features": [4]}, "0 samples"),
        ({"key": "a", "label-counts": [10**12, 0], "features": [4]}, "allowed"),
        ({"key": "a", "label-counts": [1, 2], "features": [0]}, "rows of shape"),
    ],
)
def test_registrations_within_bounds(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_registration(RecordDict({"config": ConfigRecord(config)}))


def test_a_node_without_a_key() -> None:
    with pytest.raises(InputError, match="node-config needs key="):
        site_of(tiny(), Context(1, 1, {}, RecordDict(), {}))
    with pytest.raises(InputError, match="client 'z' is not in the environment"):
        site_of(tiny(), Context(1, 1, {"key": "z"}, RecordDict(), {}))
    assert site_of(tiny(), Context(1, 1, {"partition-id": 2}, RecordDict(), {})).key == "c"

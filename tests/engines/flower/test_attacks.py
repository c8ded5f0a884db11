"""What a curious server, and one that cheats, tried on secure sums: each of these attacks once worked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower import RemoteFederation, federation_from_environment
from fedunfold.engines.flower.schema import SumStage
from fedunfold.engines.flower.secagg.client import SecAggClient
from fedunfold.engines.flower.secagg.protocol import (
    Confirmation,
    Confirmations,
    KeyBroadcast,
    SetupRequest,
    SurvivorList,
    read,
    to_record,
)
from fedunfold.rules import fixed
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from tests.engines.flower.test_secure_server import Flaky, five, secure
from tests.support.federations import simulated
from tests.support.secagg_room import Room, add_up
from tests.support.site_keys import public_text

WEIGHTS = (0.12 * torch.ones(5, 5, dtype=torch.float64) + 0.4 * torch.eye(5, dtype=torch.float64)).tolist()
"""Five rows of weights that no four of them determine: as many equations as there are clients."""


def updates_of(env: Environment, run: str = "trial-0") -> Tensor:
    """What the clients' updates in the first round are, which the server must not learn."""
    here = simulated(env)
    (report,) = here.train([Algorithm().request(run, 0, here.initial_model(run))])
    return report.updates.rows


def recovered(models: list[Tensor], start: Tensor) -> Tensor:
    """Single updates from sums of them: W⁻¹ of the sums, where all are of the same updates."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    found: Tensor = torch.linalg.solve(weights, torch.stack([model - start for model in models]))
    return found


def test_runs_under_different_weights_do_not_give_single_updates() -> None:
    """Five ordinary runs of one round, which the server has to wish for only."""
    env = five()
    clients = secure(env)
    models = [run_rounds(clients, fixed([row]), 1)[0].model for row in WEIGHTS]
    found, plain = recovered(models, clients.initial_model("trial-0")), updates_of(env)
    assert float((found - plain).norm() / plain.norm()) > 0.5
    # Had all been of one name, this would have been all there is to it.
    here = simulated(env)
    same = [run_rounds(here, fixed([row]), 1)[0].model for row in WEIGHTS]
    torch.testing.assert_close(recovered(same, here.initial_model("trial-0")), plain)


def test_learning_from_one_initial_model_is_refused() -> None:
    """It would meet the same first updates in every outer step, under other weights."""
    with pytest.raises(InputError, match="would reveal single updates; learn with initial_model='resample'"):
        learn(secure(five()), 2, learning=Learning(iterations=5))


def test_every_outer_step_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, begun = secure(five()), []
    initial_model = clients.initial_model

    def noted(run: str) -> Tensor:
        begun.append(initial_model(run))
        return begun[-1]

    monkeypatch.setattr(clients, "initial_model", noted)
    for _ in range(2):
        learn(clients, 1, learning=Learning(iterations=2, initial_model="resample"))
    trained = [
        start for i, start in enumerate(begun) if i not in (0, 3)
    ]  # the first names the work, and is not trained
    assert len(trained) == 4
    assert all(not torch.equal(one, other) for i, one in enumerate(trained) for other in trained[:i])


def test_a_run_resumes_under_its_own_name(tmp_path: Path) -> None:
    env, file = five(), tmp_path / "run.safetensors"
    clients = secure(env)
    whole = run_rounds(clients, fixed([WEIGHTS[0]] * 3), 3, checkpoint=file, on_round=lambda t, _: t == 1)[0]
    assert len(whole.scores) == 2
    resumed = run_rounds(clients, fixed([WEIGHTS[0]] * 3), 3, checkpoint=file)[0]
    assert len(resumed.scores) == 3 and torch.equal(resumed.weights[:2], whole.weights)
    assert resumed.scores[:2] == whole.scores


# --- what a client has on record -----------------------------------------------------------------------------


def behind(grid: Flaky, env: Environment) -> RemoteFederation:
    return federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True)


def forget(grid: Flaky) -> None:
    """All clients restart, or are in another run of Flower's: what they stored in its state is gone."""
    grid.states.clear()


@pytest.mark.parametrize("run", ["trial-0", "another-name"])
@pytest.mark.parametrize("between", [lambda grid: None, forget], ids=["at once", "after a restart"])
def test_a_round_is_summed_once(run: str, between: Callable[[Flaky], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server calls it: it is the same model."""
    env = five()
    grid = Flaky(env)
    clients = behind(grid, env)
    start = clients.initial_model("trial-0")
    monkeypatch.setattr(clients, "initial_model", lambda run: start)
    (first,) = run_rounds(clients, fixed([WEIGHTS[0]]), 1, ["trial-0"])
    between(grid)
    with pytest.raises(FederationError, match=r"client 'a' has added up .* before, with other clients or weights"):
        run_rounds(clients, fixed([WEIGHTS[1]]), 1, [run])
    # The same sum once more, as after an interruption of the server, says nothing new.
    (again,) = run_rounds(clients, fixed([WEIGHTS[0]]), 1, ["trial-0"])
    torch.testing.assert_close(again.model, first.model)


def test_without_a_file_the_record_is_in_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """It is lost with it, which the server notices."""
    env = five()
    grid = Flaky(env, roster="none")
    for node in grid.nodes.values():
        del node["record"]
    clients = behind(grid, env)
    run_rounds(clients, fixed([WEIGHTS[0]]), 1, ["trial-0"])
    with pytest.raises(FederationError, match=r"client 'a' has added up round 0 of run trial-0 before"):
        run_rounds(clients, fixed([WEIGHTS[1]]), 1, ["trial-0"])
    forget(grid)
    run_rounds(clients, fixed([WEIGHTS[2]]), 1, ["trial-1"])
    assert "round 0: client a has lost its record of the sums it was in" in caplog.text


def test_the_same_vectors_with_other_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lists that differ in a client would give that client's vector."""
    env = five()
    grid = Flaky(env)
    clients = behind(grid, env)
    run_rounds(clients, fixed([WEIGHTS[0]]), 1, ["trial-0"])
    grid.spoil = lambda reply, node: None if (reply.metadata.message_type, node) == ("query.mask", 101) else reply
    monkeypatch.setattr(clients._transport, "_timeout", 0.2)
    with pytest.raises(FederationError, match="client 'a' has confirmed another list of clients for the same vectors"):
        run_rounds(clients, fixed([WEIGHTS[0]]), 1, ["trial-0"])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, r"client 'a' cannot read its record .*a-record.json \(No such file"),
        (lambda file: file.write_text(""), "client 'a' finds less in its record .* than it has revealed in this run"),
        (lambda file: file.write_text("{"), "client 'a' cannot read its record .*, which is damaged; bring it back"),
    ],
    ids=["lost", "emptied", "damaged"],
)
def test_a_record_that_is_lost_is_noticed(harm: Callable[[Path], object], message: str) -> None:
    env = five()
    grid = Flaky(env)
    clients = behind(grid, env)
    run_rounds(clients, fixed([WEIGHTS[0]]), 1)
    for node in grid.nodes.values():
        harm(Path(node["record"]))
    with pytest.raises(FederationError, match=message):
        run_rounds(clients, fixed([WEIGHTS[0]]), 1)


# --- projections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "answered", "message"),
    [
        ({}, 2, "has answered 2 projections of this update and answers no more"),
        ({"max-projections-a-round": 100, "max-projections": 7}, 7, "has answered 7 projections of its updates, all"),
    ],
)
def test_unit_vectors(settings: dict[str, Any], answered: int, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """As many as the model has parameters would be the update; runs and rounds of other names do not help."""
    env = five()
    grid = Flaky(env, **settings)
    clients = behind(grid, env)
    model = clients.initial_model("trial-0")
    found = 0
    for i, unit in enumerate(torch.eye(len(model), dtype=torch.float64)):
        (report,) = clients.train([Algorithm().request(f"trial-{i % 3}", i % 2, model)])
        try:
            found += int(torch.isfinite(report.updates.inner_products(unit)).all())
        except FederationError as error:
            assert "no client answered with the projection of its update" in str(error)
    assert found == answered < len(model) / 2
    assert f"client 'a' {message}" in caplog.text


def test_projections_of_all_runs_count_together(caplog: pytest.LogCaptureFixture) -> None:
    """By default a quarter of the model's parameters, a restart or not."""
    env = five()
    grid = Flaky(env)
    for node in grid.nodes.values():
        del node["max-projections"]
    clients = behind(grid, env)
    params = len(clients.initial_model("trial-0"))
    for i in range(params // 4):
        forget(grid)
        model = clients.initial_model(f"trial-{i}")
        (report,) = clients.train([Algorithm().request(f"trial-{i}", 0, model)])
        assert torch.isfinite(report.updates.inner_products(model)).all()
    (report,) = clients.train([Algorithm().request("trial-x", 0, clients.initial_model("trial-x"))])
    with pytest.raises(FederationError, match="no client answered with the projection"):
        report.updates.inner_products(model)
    assert f"has answered {params // 4} projections of its updates, all that it ever answers" in caplog.text


# --- a server that lies ------------------------------------------------------------------------------------


class Lying(Room):
    """Five members of whom e tells the server all it knows; `told` changes a message on its way to a member."""

    def __init__(self, told: Callable[[SumStage, str, RecordDict], RecordDict]) -> None:
        super().__init__({key: np.full(4, float(ord(key))) for key in "abcde"})
        self.told = told

    def reply(self, stage: SumStage, key: str, message: RecordDict) -> RecordDict:
        return super().reply(stage, key, self.told(stage, key, message))


def test_a_server_that_lies_about_survivors_learns_nothing() -> None:
    """It tells a and b that a survived, c and d that it dropped out: with e's own shares, three of each secret.

    That was enough where a majority was. Now neither list has four signatures, and nobody reveals a share.
    """

    def told(stage: SumStage, key: str, message: RecordDict) -> RecordDict:
        if stage == "confirm" and key in "cd":
            found = read(message, SurvivorList)
            return to_record(found.model_copy(update={"members": ("b", "c", "d", "e")}))
        return message

    room = Lying(told)
    with pytest.raises(FederationError, match="has not confirmed the sum that it was told of"):
        add_up(room)
    assert not [key for stage, key, _ in room.received if stage == "unmask"]
    # Whatever it picks of what was signed: no four of them are of one list.
    signed = {key: read(reply, Confirmation).signature for stage, key, reply in room.received if stage == "confirm"}
    for key in "abcd":
        secrets = room.secrets[key]
        assert secrets is not None
        for names in ("abe", "bcde", "abcde", "abcd"):
            some = tuple(name for name in names if name in secrets.survivors)
            shown = Confirmations(sum_id=secrets.sum_id, members=some, signatures=tuple(signed[n] for n in some))
            with pytest.raises(InputError, match="reveals nothing"):
                room.member(key).unmask(secrets, shown)


def test_substituted_keys_are_refused() -> None:
    """Keys of the server's own in the place of b's, whose shares it could read with them."""

    def told(stage: SumStage, key: str, message: RecordDict) -> RecordDict:
        if stage != "share" or key == "b":
            return message
        found = read(message, KeyBroadcast)
        own = SecAggClient("b").advertise(SetupRequest(sum_id=found.sum_id))[1]
        keys = tuple(
            own.encryption if k == "b" else known for k, known in zip(found.members, found.encryption_keys, strict=True)
        )
        return to_record(found.model_copy(update={"encryption_keys": keys}))

    with pytest.raises(FederationError, match="gets keys as client 'b's that 'b' has not signed for this sum"):
        add_up(Lying(told))


def test_invented_members_are_refused() -> None:
    """A server with many members of its own would know all vectors in a sum but one."""
    room = Room({key: np.ones(4) for key in "abcdefgh"})
    room.roster = tuple("abc")
    with pytest.raises(FederationError, match="client 'a' takes part with no 'd', who is not in its roster"):
        add_up(room)


def test_a_roster_lists_a_key_once() -> None:
    """One site under two names would be two members."""
    env = five()
    grid = Flaky(env)
    roster = Path(grid.nodes[100]["roster"])
    roster.write_text(roster.read_text().replace(public_text("b"), public_text("c")))
    with pytest.raises(FederationError, match="the roster has one key under two names; give every site its own"):
        run_rounds(behind(grid, env), fixed([WEIGHTS[0]]), 1)


def send(grid: Flaky, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Let the server send some clients another model when they are to add their updates."""
    honest = grid.app

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.mask":
            arrays = message.content.array_records["arrays"]
            model = change(str(context.node_config["client-id"]), arrays["model"].numpy())
            message.content["arrays"] = ArrayRecord({**arrays, "model": Array(model)})
        return honest(message, context)

    grid.app = app  # type: ignore[assignment]


def test_another_model_for_the_others_is_refused() -> None:
    """One whose gradients vanish, so that the sum is a's update."""
    env = five()
    grid = Flaky(env)
    send(grid, lambda key, model: model if key == "a" else 0 * model)
    with pytest.raises(FederationError, match="client 'a' reveals nothing: 'b' has not confirmed the sum"):
        run_rounds(behind(grid, env), fixed([WEIGHTS[0]]), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: 1e9 * model, r"client 'a' is sent a model of norm .*, and takes at most 1e\+06"),
        (lambda model: np.full_like(model, np.nan), "client 'a' is sent a model of norm nan"),
        (lambda model: model[:-1], "client 'a' is sent a model of shape .*, and its own has"),
    ],
    ids=["large", "nan", "short"],
)
def test_models_out_of_bounds(change: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    env = five()
    grid = Flaky(env)
    send(grid, lambda _, model: change(model))
    with pytest.raises(FederationError, match=message):
        run_rounds(behind(grid, env), fixed([WEIGHTS[0]]), 1)


@pytest.mark.parametrize("weights", [[1.0, 0.0, 0.0, 0.0, 0.0], [0.97, 0.0, 0.01, 0.01, 0.01]])
def test_a_client_that_counts_nearly_alone(weights: list[float]) -> None:
    with pytest.raises(
        FederationError, match=r"client 'a' takes part in sums in which nobody counts for more than 0.8"
    ):
        run_rounds(secure(five()), fixed([weights]), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min-members": 6}, r"sums of at least 6 clients, not of 5 \(min-members\)"),
        ({"max-share": 0.3}, r"more than 0.3 of all, not 0.4\d+ \(max-share\)"),
        ({"min-members": 1}, "SitePolicy: field min_members: must be at least 2, got 1"),
        ({"roster": None}, 'has secure-aggregation=true and no roster in its node-config; .* or give roster="none"'),
        ({"signing-key": None}, "has a roster and no signing-key in its node-config"),
        ({"record": None}, "has a roster and no record in its node-config"),
        ({"roster": "nowhere.json"}, "cannot read the roster nowhere.json: No such file"),
        ({"signing-key": "nowhere"}, "cannot read the key nowhere: No such file"),
    ],
)
def test_what_a_node_config_says(settings: dict[str, Any], message: str) -> None:
    env = five()
    grid = Flaky(env, **settings)
    for node in grid.nodes.values():
        for name in [name for name, value in node.items() if value is None]:
            del node[name]
    with pytest.raises(FederationError, match=message):
        run_rounds(behind(grid, env), fixed([WEIGHTS[0]]), 1)


def test_another_sites_key() -> None:
    env = five()
    grid = Flaky(env)
    for node in grid.nodes.values():
        node["signing-key"] = grid.nodes[101]["signing-key"]
    with pytest.raises(FederationError, match=r"the roster does not have the key in .* as that of 'a'"):
        run_rounds(behind(grid, env), fixed([WEIGHTS[0]]), 1)

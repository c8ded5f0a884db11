"""Every task over Flower: the simulation's numbers, metrics of all clients' rows, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.fields import Client
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.task import Task
from fedunfold.engines.flower import (
    LocalClient,
    RemoteFederation,
    SecureFederation,
    client_app,
    client_from_environment,
    federation_from_environment,
)
from fedunfold.engines.flower.secagg.fixed_point import error_bound
from fedunfold.engines.flower.secure_client import SECURE
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.engines.flower.wire import read_registration
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import nova, sgd
from fedunfold.rules import dr, fedfa
from fedunfold.tasks import classification, regression, survival, task
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind
from tests.support.federations import assert_same
from tests.support.grid import LocalGrid, Spoil
from tests.support.run_names import named_as_given
from tests.unfolding.test_task_gradients import CASES, TOKENS, federation_of, perceptron

KEYS = ("a", "b", "c")
NINE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
LEARNED = ["mse", "efron", "attention", "custom"]


def case(name: str, *, absent: bool = True) -> tuple[Environment, ModelFactory]:
    chosen, targets, inputs, build, _ = CASES[name]
    env = federation_of(chosen, targets, inputs)
    return env if absent else env.replace(clients=tuple(Client(key=key) for key in KEYS)), build


def grid_of(env: Environment, build: ModelFactory, spoil: Spoil | None = None, *, secure: bool = False) -> LocalGrid:
    app = client_app(lambda context: client_from_environment(env, context, torch.float64, model=build))
    of_all = {SECURE: secure, "roster": "none", "max-projections": 100}
    return LocalGrid(app, {100 + k: {"client-id": key, **of_all} for k, key in enumerate(KEYS)}, spoil)


def both(name: str) -> tuple[SimulatedFederation, RemoteFederation]:
    env, build = case(name)
    here = SimulatedFederation(env, model=build, dtype=torch.float64)
    return here, federation_from_environment(grid_of(env, build), env, model=build, dtype=torch.float64)


# --- the simulation's numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_whole_learning(name: str, adjoint: AdjointKind) -> None:
    learning = Learning(iterations=2, adjoint=adjoint, step_sizes="learned")
    here, there = (learn(federation, 3, learning=learning) for federation in both(name))
    torch.testing.assert_close(there.weights, here.weights, **NINE)
    assert there.losses == pytest.approx(here.losses, rel=1e-12)


@pytest.mark.parametrize("name", LEARNED)
def test_a_run(name: str) -> None:
    algorithm = Algorithm(nova(), absent="remember")
    here, there = (run_rounds(federation, dr(), 3, algorithm=algorithm)[0] for federation in both(name))
    assert not here.participated.all()
    torch.testing.assert_close(there.model, here.model, **NINE)
    torch.testing.assert_close(there.weights, here.weights, **NINE)
    for mine, theirs in zip(here.evaluations, there.evaluations, strict=True):
        assert dict(theirs.metrics) == pytest.approx(dict(mine.metrics), rel=1e-9)
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-9)


@pytest.mark.parametrize("outer", ["path", "balanced"])
@pytest.mark.parametrize("name", LEARNED)
def test_every_message(name: str, outer: str) -> None:
    """Balancing has no meaning without classes, and is the loss of samples in both engines."""
    here, there = both(name)
    model = here.initial_model("learn-0")
    assert torch.equal(there.initial_model("learn-0"), model)
    loss = OUTER_LOSSES.make(outer)
    request = TrainRequest("learn-0", 0, model, sgd(), frozenset({"loss", "start_loss"}), loss, path_gradient=True)
    (mine,), (theirs,) = here.train([request]), there.train([request])
    assert torch.equal(theirs.participated, mine.participated)
    assert_same(theirs.updates.rows, mine.updates.rows)
    assert_same(theirs.metric("loss"), mine.metric("loss"), unknown=True)
    assert_same(theirs.metric("start_loss"), mine.metric("start_loss"), unknown=True)
    assert theirs.outer.loss == pytest.approx(mine.outer.loss, rel=1e-12)
    assert mine.outer.gradient is not None
    assert_same(theirs.outer.gradient, mine.outer.gradient)
    adjoints = torch.randn(mine.updates.rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,), (found,) = (f.vjp([request], [mine.participated], [adjoints]) for f in (here, there))
    assert_same(found, expected)
    (final,), (also,) = here.outer_loss([request]), there.outer_loss([request])
    assert also.loss == pytest.approx(final.loss, rel=1e-12)
    assert_same(also.gradient, final.gradient)


# --- clients that test -------------------------------------------------------------------------------------


def self_testing(env: Environment, build: ModelFactory, *, secure: bool = False) -> RemoteFederation:
    transport = FlowerTransport(grid_of(env, build, secure=secure), KEYS)
    kind = SecureFederation if secure else RemoteFederation
    return kind(transport, env, build, None, dtype=torch.float64)


def pairs_in_order(risks: Tensor, targets: Tensor) -> tuple[float, int]:
    """Pairs of rows whose order is known, counted one by one, and those of them whose risks are in that order."""
    right, known = 0.0, 0
    for i, (time, event) in enumerate(targets.tolist()):
        for j, (other, seen) in enumerate(targets.tolist()):
            if event and (time < other or (time == other and not seen)):
                known += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 * float(risks[i] == risks[j])
    return right, known


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("efron", "breslow")])
def test_metrics_are_those_of_all_rows(name: str, secure: bool) -> None:
    """As of one client that has them all."""
    env, build = case(name)
    data = env.load()
    pooled = replace(data, test_inputs=data.inputs, y_test=data.y)
    here = SimulatedFederation(env, pooled, model=build, dtype=torch.float64)
    model = here.initial_model("trial-0")
    (expected,), (found,) = here.evaluate([model]), self_testing(env, build, secure=secure).evaluate([model])
    assert dict(found.metrics) == pytest.approx(dict(expected.metrics), rel=1e-9, nan_ok=True)
    assert set(found.metrics) >= {env.load().task.primary}
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    torch.testing.assert_close(found.class_accuracy, expected.class_accuracy, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("secure", [False, True])
def test_a_concordance_counts_every_clients_pairs(secure: bool) -> None:
    env, build = case("efron")
    here = SimulatedFederation(env, model=build, dtype=torch.float64)
    model, data = here.initial_model("trial-0"), env.load()
    risks = here.module(model).double()(data.x.double())[:, 0].detach()
    slices = [slice(*ends) for ends in zip(data.offsets, data.offsets[1:], strict=False)]
    pairs = [pairs_in_order(risks[rows], data.y[rows]) for rows in slices]
    (found,) = self_testing(env, build, secure=secure).evaluate([model])
    right, known = np.sum(pairs, axis=0)
    assert found.metrics["concordance"] == pytest.approx(right / known, rel=1e-12)
    means = [float(data.task.losses(risks[rows, None], data.y[rows]).mean()) for rows in slices]
    assert found.loss == pytest.approx(np.average(means, weights=data.sizes), rel=1e-12)


def test_nobody_answers_a_test() -> None:
    env, build = case("mse")

    def silent(reply: Message, node: int) -> Message | None:
        return None if reply.metadata.message_type == "evaluate" else reply

    transport = FlowerTransport(grid_of(env, build, silent), KEYS, timeout=0.1)
    federation = RemoteFederation(transport, env, build, None, dtype=torch.float64)
    (found,) = federation.evaluate([federation.initial_model("trial-0")])
    assert np.isnan(found.loss) and not found.metrics


# --- secure sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("name", ["mse", "efron"])
def test_learning_in_secure_sums(name: str, adjoint: AdjointKind, monkeypatch: pytest.MonkeyPatch) -> None:
    named_as_given(monkeypatch)
    env, build = case(name, absent=False)
    learning = Learning(iterations=2, adjoint=adjoint, initial_model="resample")
    here = learn(SimulatedFederation(env, model=build, dtype=torch.float64), 3, learning=learning)
    there = learn(self_testing(env, build, secure=True), 3, learning=learning)
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=100 * error_bound(3))


def test_a_secure_client_shows_no_statistics() -> None:
    env, build = case("mse", absent=False)
    transport = FlowerTransport(grid_of(env, build, secure=True), KEYS)
    federation = RemoteFederation(transport, env, build, None, dtype=torch.float64)
    federation.evaluate([federation.initial_model("trial-0")])
    assert federation.failures.as_dict() == {key: {"failed": 1} for key in KEYS}


# --- what leaves a client ----------------------------------------------------------------------------------

SHOWN = {
    "query.register": ({"client-id", "label-counts", "task", "statistics", "shape:"}, set()),
    "train": ({"outer_loss"}, {"updates", "outer_gradient"}),
    "query.vjp": (set(), {"adjoint"}),
    "query.outer_loss": ({"outer_loss"}, {"gradient"}),
    "evaluate": ({"loss"}, {"statistics"}),
}
"""Numbers and arrays of every reply, as docs/what-leaves-a-client.md lists them."""


@pytest.mark.parametrize("name", ["mse", "efron"])
def test_nothing_of_a_row_leaves_a_client(name: str) -> None:
    env, build = case(name)
    replies: list[Message] = []

    def listen(reply: Message, node: int) -> Message:
        replies.append(reply)
        return reply

    transport = FlowerTransport(grid_of(env, build, listen), KEYS)
    federation = RemoteFederation(transport, env, build, None, dtype=torch.float64)
    learned = learn(federation, 3, learning=Learning(iterations=1, adjoint="exact"))
    run_rounds(federation, learned, 3)
    assert {reply.metadata.message_type for reply in replies} == set(SHOWN)
    for reply in replies:
        numbers, arrays = SHOWN[reply.metadata.message_type]
        content = reply.content
        records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
        assert {key for record in records for key in record} == numbers
        found = {key: array for record in content.array_records.values() for key, array in record.items()}
        assert set(found) <= arrays
        lengths = dict.fromkeys(found, federation.layout.size) | {"statistics": 5 if name == "mse" else 2}
        assert all(array.numpy().shape == (lengths[key],) for key, array in found.items())


# --- what is refused ---------------------------------------------------------------------------------------


def mixed(of: Callable[[str], LocalClient], env: Environment, build: ModelFactory) -> RemoteFederation:
    """A federation in which every client is what the function says."""
    app = client_app(lambda context: of(str(context.node_config["client-id"])))
    grid = LocalGrid(app, {k: {"client-id": key} for k, key in enumerate(KEYS)})
    return RemoteFederation(FlowerTransport(grid, KEYS), env, build, None, dtype=torch.float64)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            regression("huber"),
            "client b has the task regression:loss=huber,delta=1.0,outputs=1, the server has "
            "regression:loss=mse,delta=1.0,outputs=1; make them alike",
        ),
        (task("own", CASES["custom"][4], {"mae": CASES["custom"][4]}), "client b has the task own:primary=mae, the"),
    ],
)
def test_another_task(other: Task, message: str) -> None:
    env, build = case("mse")

    def client(key: str) -> LocalClient:
        chosen = other if key == "b" else regression()
        return LocalClient(key, torch.zeros(4, 5), torch.arange(4.0), chosen, build, torch.float64)

    with pytest.raises(InputError, match=message):
        mixed(client, env, build)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (5, r"client c has rows of shape \[4\] for 'ids', \[5\] for 'mask', a has \[4\] for 'ids', \[4\] for 'mask'"),
        (None, r"client c has rows of shape \[4\] for 'ids', a has \[4\] for 'ids', \[4\] for 'mask'; make them alike"),
    ],
)
def test_other_inputs(mask: int | None, message: str) -> None:
    env, _ = case("attention")

    class Any4(nn.Module):
        """Reads whatever it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(TOKENS, TOKENS)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            out: Tensor = self.embed(ids)
            return out

    def client(key: str) -> LocalClient:
        ids = torch.zeros(3, 4, dtype=torch.int64)
        width = mask if key == "c" else 4
        inputs = {"ids": ids} | ({"mask": torch.zeros(3, width, dtype=torch.bool)} if width else {})
        return LocalClient(key, inputs, ids, env.load().task, Any4, torch.float64)

    with pytest.raises(InputError, match=message):
        mixed(client, env, Any4)


def test_a_client_that_counts_otherwise() -> None:
    env, build = case("mse")

    def lying(reply: Message, node: int) -> Message:
        if node == 101 and reply.metadata.message_type == "query.register":
            fields = dict(reply.content.config_records["config"])
            reply.content = RecordDict({"config": ConfigRecord(fields | {"label-counts": [2, 2]})})
        return reply

    with pytest.raises(InputError, match="client b has 2 classes and 5 statistics for the task regression:loss=mse,"):
        RemoteFederation(FlowerTransport(grid_of(env, build, lying), KEYS), env, build, None)


def test_targets_that_are_none_of_the_task() -> None:
    build = perceptron(1)
    with pytest.raises(InputError, match=r"y of client a has shape \(4,\); give \(time, event\) in every row"):
        LocalClient("a", torch.zeros(4, 5), torch.arange(4.0), survival(), build)
    with pytest.raises(InputError, match=r"y of client a has shape \(4, 1\); give one label a row"):
        LocalClient("a", torch.zeros(4, 5), torch.zeros(4, 1, dtype=torch.int64), classification(2), build)
    with pytest.raises(InputError, match="client a has 3 samples for 4 targets"):
        LocalClient("a", {"x": torch.zeros(4, 5), "z": torch.zeros(3)}, torch.arange(4.0), regression(), build)


def test_a_rule_that_needs_accuracies() -> None:
    """Before anybody trains, in both modes and in the simulation's words."""
    env, build = case("mse", absent=False)
    simulation = SimulatedFederation(env, model=build, dtype=torch.float64)
    for federation in (simulation, self_testing(env, build), self_testing(env, build, secure=True)):
        with pytest.raises(InputError, match="the rule needs clients' accuracies, which the task regression has not"):
            run_rounds(federation, fedfa(), 1)


def test_losses_below_zero() -> None:
    """A user's own losses may be."""
    env, build = case("custom")
    below = task("shifted", lambda z, y: (z[:, 0] - y) ** 2 - 100, {"mae": lambda z, y: (z[:, 0] - y).abs()})
    data = replace(env.load(), task=below)
    env = env.replace(task=below, data=env.data.model_copy(update={"data": data}))
    federation = federation_from_environment(grid_of(env, build), env, model=build, dtype=torch.float64)
    here = SimulatedFederation(env, model=build, dtype=torch.float64)
    mine, theirs = (learn(f, 2, learning=Learning(iterations=1)).weights for f in (here, federation))
    torch.testing.assert_close(theirs, mine, **NINE)
    assert federation.failures.as_dict() == {}


def test_a_registration_travels() -> None:
    """Inputs by name, and a task with settings."""
    env, build = case("attention")
    grid = grid_of(env, build)
    grid.push_messages([Message(RecordDict(), 100, "query.register")])
    found = read_registration(grid.replies.popitem()[1].content)
    assert (found.client_id, found.label_counts, found.task) == ("a", (7,), "next_token:vocabulary=6")
    assert (found.shapes, found.num_statistics) == ({"ids": (4,), "mask": (4,)}, 3)

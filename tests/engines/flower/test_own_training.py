"""An app in Flower's own style learns weights with its own train function, by the few lines that the page shows."""

import difflib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.engines.flower import FederationConfig, LocalClient, federation_from_config, own_training_app
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import sgd
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import learn
from tests.engines.flower.apps.learning_app import client_app, server_app
from tests.engines.flower.apps.results import load_result
from tests.engines.flower.apps.torch_app.task import Net
from tests.support.grid import LocalGrid

APPS = Path(__file__).parent / "apps"
PAGE = Path(__file__).parents[3] / "docs" / "flower.md"
NODES = {k: {"partition-id": k, "num-partitions": 4} for k in range(4)}
ROUNDS = 3


# --- the app of the page -----------------------------------------------------------------------------------


def changes(file: str) -> list[str]:
    """What differs between an app for FedAvg and the one that learns, but for where its own parts are imported from."""
    theirs, ours = ((APPS / app / file).read_text().splitlines() for app in ("torch_app", "learning_app"))
    return [line for line in difflib.ndiff(theirs, ours) if line[0] in "+-" and line[1:].strip()]


@pytest.mark.parametrize("file", ["client_app.py", "server_app.py"])
def test_the_page_shows_the_lines_that_are_changed(file: str) -> None:
    """A line of the page may be indented as its block is, and shorter by what is the app's own."""
    shown = re.search(rf"^ *# {re.escape(file)}\n((?: {{4}}.*\n|\n)+)", PAGE.read_text(), re.MULTILINE)
    assert shown is not None
    on_page = {re.sub(r"\s", "", line) for line in shown[1].splitlines() if line.strip()[:1] in ("+", "-")}
    assert on_page == {re.sub(r"\s", "", line) for line in changes(file)}


def test_the_app_learns_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(client_app.app, NODES)
    server_app.main(grid, Context(1, 1, {}, None, {"num-server-rounds": ROUNDS, "folder": str(tmp_path)}))  # type: ignore[arg-type]
    _, metrics = load_result(tmp_path)
    losses = [found["train_loss"] for found in metrics["train_metrics_clientapp"].values()]
    assert len(losses) == ROUNDS and losses[-1] < losses[0]
    assert not {"rejected", "failed", "no answer", "Traceback"} & set(re.findall(r"\w+(?: answer)?", caplog.text))
    kinds = [message.metadata.message_type for message in grid.sent]
    steps = 5
    assert kinds.count("query.register") == 4
    assert kinds.count("query.outer_loss") == steps * ROUNDS * 4, "the models after every round"
    assert kinds.count("train") == (steps + 1) * ROUNDS * 4, "and WeightedStrategy's"


# --- what it computes --------------------------------------------------------------------------------------


class Small(nn.Module):
    """One layer with a normalisation, whose statistics go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.out(self.norm(x))
        return z


def rows(k: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(k)
    return torch.randn(6 + 3 * k, 4, generator=draw), torch.randint(0, 3, (6 + 3 * k,), generator=draw)


def local_client(context: Context, model: Any = Small) -> LocalClient:
    k = int(context.node_config["partition-id"])
    return LocalClient(f"client-{k}", *rows(k), fu.classification(3), model)


def own_step(model: Any = Small, **metrics: float) -> Any:
    """One step of SGD on all rows, as somebody writes it for FedAvg."""

    def train(message: Message, context: Context) -> Message:
        net, config = model(), message.content.config_records["config"]
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        x, y = rows(int(context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(net.parameters(), lr=float(config["lr"]))  # type: ignore[arg-type]
        nn.functional.cross_entropy(net.train()(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found = MetricRecord({"num-examples": len(y), "round": config["server-round"], **metrics})  # type: ignore[dict-item]
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": found}), reply_to=message)

    return train


def app_of(train: Any, **settings: Any) -> ClientApp:
    app = own_training_app(local_client, **settings)
    app.train()(train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1, "mine": 1.0})})
        return Message(content, reply_to=message)

    return app


CONFIG = FederationConfig(
    client_ids=("client-0", "client-1", "client-2"), task=fu.classification(3), rounds=3, batch_size=32, lr=0.4
)
TEST = rows(9)
EVERY_ROUND = fu.Learning(outer="every-round", iterations=3)


def grid_of(train: Any, **settings: Any) -> LocalGrid:
    return LocalGrid(app_of(train, **settings), {k: {"partition-id": k} for k in range(3)})


def simulated() -> SimulatedFederation:
    """The engine makes the same step: its minibatches have all rows."""
    env = Environment.from_arrays(
        {f"client-{k}": rows(k) for k in range(3)}, TEST, rounds=3, batch_size=32, lr=0.4, classes=3
    )
    return SimulatedFederation(env, model=Small, dtype=torch.float32)


@pytest.mark.parametrize("outer", ["every-round", "final", "final-balanced"])
def test_the_weights_are_those_of_the_engine(outer: str) -> None:
    learning = fu.Learning(outer=outer, iterations=3)
    there = learn(federation_from_config(grid_of(own_step()), CONFIG, TEST, model=Small), 3, learning=learning)
    here = learn(simulated(), 3, learning=learning)
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-4)
    assert there.losses == pytest.approx(here.losses, rel=1e-5)
    sizes = torch.tensor([6, 9, 12]) / 27
    assert (there.weights - sizes).abs().max() > 0.1, "something is learned"


def test_a_run_is_the_engines_and_is_tested_where_asked() -> None:
    (here,) = run_rounds(simulated(), size(), 3)
    for test in (TEST, None):
        clients = federation_from_config(grid_of(own_step()), CONFIG, test, model=Small)
        (there,) = run_rounds(clients, size(), 3)
        torch.testing.assert_close(there.model, here.model, rtol=1e-5, atol=1e-6)
        if test is not None:
            assert there.evaluations[-1].loss == pytest.approx(here.evaluations[-1].loss, rel=1e-5)
        assert clients.failures.as_dict() == {}


def test_the_same_app_serves_flowers_strategy_and_brings_its_ids() -> None:
    strategy = fu.WeightedStrategy(fu.size())
    lr = ConfigRecord({"lr": 0.4})
    result = strategy.start(grid_of(own_step()), ArrayRecord(Small().state_dict()), num_rounds=2, train_config=lr)
    assert sorted(strategy.weights[0]) == ["client-0", "client-1", "client-2"]
    assert dict(result.evaluate_metrics_clientapp[1]) == {"mine": 1.0}


def test_rounds_count_from_1_as_flowers_do() -> None:
    grid, seen = grid_of(own_step()), []
    train = own_step()

    def noted(message: Message, context: Context) -> Message:
        seen.append(dict(message.content.config_records["config"]))
        return train(message, context)  # type: ignore[no-any-return]

    grid = grid_of(noted)
    run_rounds(federation_from_config(grid, CONFIG, TEST, model=Small), size(), 2)
    assert seen == [{"server-round": t, "lr": 0.4} for t in (1, 1, 1, 2, 2, 2)]


# --- what a rule reads -------------------------------------------------------------------------------------


def test_a_rule_reads_what_the_train_function_reports() -> None:
    def train(message: Message, context: Context) -> Message:
        found = own_step(train_loss=0.5, first=1.0 + int(context.node_config["partition-id"]))
        return found(message, context)  # type: ignore[no-any-return]

    grid = grid_of(train, metric_names={"loss": "train_loss", "start_loss": "first"})
    clients = federation_from_config(grid, CONFIG, TEST, model=Small)
    (found,) = run_rounds(clients, fu.dr(q=1, loss="start"), 1)
    expected = np.array([1, 2, 3]) ** 2 * np.array([6, 9, 12])  # N_k F_k^{q+1}
    np.testing.assert_allclose(found.weights[0], expected / expected.sum())


def test_what_a_rule_needs_and_nobody_reports(caplog: pytest.LogCaptureFixture) -> None:
    clients = federation_from_config(grid_of(own_step()), CONFIG, TEST, model=Small)
    (found,) = run_rounds(clients, fu.dr(q=1, loss="start"), 1, algorithm=fu.Algorithm(absent="drop"))
    assert not found.participated.any()
    assert clients.failures.as_dict() == {key: {"failed": 1} for key in CONFIG.client_ids}
    assert (
        "client client-1 reports no number 'start_loss', which the rule requires; say under which name" in caplog.text
    )


def test_norms_are_measured() -> None:
    clients = federation_from_config(grid_of(own_step()), CONFIG, TEST, model=Small)
    model = clients.initial_model("trial-0")
    (report,) = clients.train([TrainRequest("trial-0", 0, model, sgd(), frozenset({"norm"}))])
    expected = clients.layout.params(report.updates.rows).norm(dim=1).double()
    torch.testing.assert_close(report.metrics.norm, expected, rtol=1e-6, atol=0)
    assert report.num_steps.tolist() == [0, 0, 0], "nobody has said how many"


# --- what cannot be done -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning": fu.Learning()}, "no outer loss 'path' along its training; learn for outer='every-round' or"),
        ({"learning": fu.Learning(outer="final", adjoint="exact")}, "whose derivative is not known; learn with adj"),
        ({"algorithm": fu.Algorithm(fu.momentum(0.9)), "learning": EVERY_ROUND}, "not by momentum; leave out the loc"),
    ],
    ids=["path", "exact", "momentum"],
)
def test_what_an_own_function_cannot_do(settings: dict[str, Any], message: str) -> None:
    clients = federation_from_config(grid_of(own_step()), CONFIG, TEST, model=Small)
    with pytest.raises(InputError, match=rf"client client-0 trains by a function of its own.*{message}"):
        learn(clients, 2, **settings)


def test_sums_alone() -> None:
    with pytest.raises(InputError, match="shows its update; leave out secure aggregation"):
        federation_from_config(grid_of(own_step()), CONFIG, TEST, model=Small, secure_aggregation=True)
    grid = grid_of(own_step())
    grid.run_config["secure-aggregation"] = True
    clients = federation_from_config(grid, CONFIG, TEST, model=Small)
    (found,) = run_rounds(clients, size(), 1)
    assert not found.participated.any()
    assert clients.failures.as_dict() == {key: {"failed": 1} for key in CONFIG.client_ids}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content.update({"more": ArrayRecord(Net().state_dict())}), "2 array records in place of one"),
        (
            lambda content: content.update({"arrays": ArrayRecord(Net().state_dict())}),
            "that are not its model's",
        ),
        (lambda content: content["arrays"].pop("out.bias"), "that are not its model's"),
    ],
    ids=["two records", "another model", "a missing array"],
)
def test_a_function_that_replies_with_something_else(
    spoil: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    train = own_step()

    def spoiled(received: Message, context: Context) -> Message:
        reply: Message = train(received, context)
        if context.node_config["partition-id"] == 1:
            spoil(reply.content)
        return reply

    clients = federation_from_config(grid_of(spoiled), CONFIG, TEST, model=Small)
    (found,) = run_rounds(clients, size(), 1)
    assert found.participated[0].tolist() == [True, False, True]
    assert re.search(rf"client client-1: failed \(round 0: client client-1 replies with .*{message}", caplog.text)

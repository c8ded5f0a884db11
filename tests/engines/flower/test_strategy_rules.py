"""Every rule in a WeightedStrategy: the numbers of a simulated run where clients can serve it, an error where not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import FederationError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.engines.flower import ClientDescription, WeightedStrategy, registration_mod
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import WeightingRule
from fedunfold.rules.rule import for_rounds
from fedunfold.training.loop import run_rounds
from tests.support.federations import RUN, SIZES, participation, simulated, tiny
from tests.support.grid import LocalGrid

ROUNDS = 4
NODES: dict[int, dict[str, Any]] = {node: {} for node in (1, 2, 3)}
NAMES = dict(zip(NODES, SIZES, strict=True))
METRICS = frozenset({"loss", "start_loss", "accuracy"})
LR = 0.3

RULES: list[WeightingRule] = [
    fu.size(),
    fu.uniform(),
    fu.dr(),
    fu.dr(loss="start"),
    fu.fedadp(),
    fu.fedfa(),
    fu.feddisco(),
    fu.q_fedavg(lr=LR),
    fu.afl(),
    fu.fedawa(lr=0.2),
    fu.online_hypergradient(step_size=0.3, lr=LR),
    fu.unfolded_formula(),
]


def flaky() -> Environment:
    """Everybody takes part in the first round, and in some later one somebody does not."""
    for seed in range(200):
        env = tiny(participation_probability=0.7, seed=seed, rounds=ROUNDS, lr=LR)
        here = [participation(env, RUN, t).participating for t in range(ROUNDS)]
        if here[0].all() and all(row.any() for row in here) and not all(row.all() for row in here):
            return env
    raise AssertionError("no seed has such rounds")


@pytest.fixture(autouse=True)
def everybody_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower draws the order of nodes; clients are listed in the order they are met in."""
    monkeypatch.setattr("flwr.serverapp.strategy.fedavg.sample_nodes", lambda *_: (list(NODES), list(NODES)))


class Clients:
    """Ordinary Flower clients that train as those of a simulation do; who is absent there fails here."""

    def __init__(
        self, federation: SimulatedFederation, *, registers: bool = True, silent_on: Sequence[str] = ()
    ) -> None:
        self.federation, self.silent_on = federation, silent_on
        self.rounds: dict[int, ClientUpdates] = {}
        counts = {client.client_id: client.label_counts for client in federation.clients}

        def describe(context: Context) -> ClientDescription:
            name = NAMES[context.node_id]
            return ClientDescription(name, counts[name])

        self.app = ClientApp(mods=[registration_mod(describe)] if registers else [])
        self.app.train()(self.train)

    def train(self, message: Message, context: Context) -> Message:
        t = int(message.content.config_records["config"]["server-round"]) - 1  # type: ignore[arg-type]
        model = self.vector(message.content.array_records["arrays"])
        if t not in self.rounds:
            request = Algorithm(absent_loss="skip").request(RUN, t, model, required_metrics=METRICS)
            (self.rounds[t],) = self.federation.train([request])
        report, k = self.rounds[t], list(NAMES.values()).index(NAMES[context.node_id])
        (row,) = report.updates.rows[report.updates.clients == k]
        metrics: dict[str, Any] = {"num-examples": int(report.num_examples[k]), "num_steps": int(report.num_steps[k])}
        metrics |= {name: float(report.metric(name)[k]) for name in METRICS}  # type: ignore[arg-type]
        told = {name: value for name, value in metrics.items() if name not in self.silent_on}
        content = RecordDict({"arrays": self.record(model + row), "metrics": MetricRecord(told)})
        return Message(content, reply_to=message)

    def record(self, model: torch.Tensor) -> ArrayRecord:
        layout = self.federation.layout
        parts = torch.split(model, [shape.numel() for shape in layout.shapes])
        named = zip(layout.names, layout.shapes, parts, strict=True)
        return ArrayRecord({name: Array(part.reshape(shape).numpy()) for name, shape, part in named})

    def vector(self, record: ArrayRecord) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([record[name].numpy().ravel() for name in self.federation.layout.names]))

    def run(self, rule: WeightingRule, **settings: Any) -> tuple[WeightedStrategy, torch.Tensor]:
        strategy = WeightedStrategy(rule, fraction_evaluate=0.0, **settings)
        start = self.record(self.federation.initial_model(RUN))
        result = strategy.start(LocalGrid(self.app, NODES), start, num_rounds=ROUNDS, timeout=5)
        return strategy, self.vector(result.arrays)


@pytest.mark.parametrize("absent", ["drop", "remember"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_it_is_the_simulated_run(rule: WeightingRule, absent: Any) -> None:
    federation = simulated(flaky())
    strategy, model = Clients(federation).run(rule, absent=absent)
    algorithm = replace(strategy.algorithm, absent_loss="skip")  # some rules bring a server of their own
    (expected,) = run_rounds(federation, for_rounds(rule, ROUNDS), ROUNDS, algorithm=algorithm)
    assert not expected.participated.all()
    torch.testing.assert_close(model, expected.model, rtol=1e-9, atol=1e-10)
    found = [[row[name] for name in NAMES.values()] for row in strategy.weights]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected.weights, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("absent", ["drop", "remember"])
def test_layers_that_shrink_are_those_of_the_simulated_run(absent: Any) -> None:
    federation, server = simulated(flaky()), fu.server.fedlws(beta=1.0, max_tau=9.0)
    (expected,) = run_rounds(federation, fu.size(), ROUNDS, algorithm=Algorithm(server=server, absent=absent))
    _, model = Clients(federation).run(fu.size(), absent=absent, server=server)
    torch.testing.assert_close(model, expected.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "clients", "message"),
    [
        (fu.feddisco(), {"registers": False}, "rule 'feddisco' needs the label counts of every client"),
        (fu.q_fedavg(), {}, "rule 'q-fedavg' needs the clients' learning rate"),
        (fu.q_fedavg(lr=LR), {"silent_on": ["start_loss"]}, "has None for 'start_loss', which rule 'q-fedavg"),
        (fu.afl(), {"silent_on": ["start_loss"]}, "has None for 'start_loss', which rule 'afl' requires"),
        (fu.online_hypergradient(), {}, "rule 'online-hypergradient' needs the clients' learning rate"),
        (
            fu.online_hypergradient(lr=LR),
            {"silent_on": ["num_steps"]},
            "needs the number of local steps of every client",
        ),
    ],
)
def test_what_clients_cannot_serve_is_an_error(rule: WeightingRule, clients: Any, message: str) -> None:
    with pytest.raises(FederationError, match=f"none of {ROUNDS} rounds has trained the model, .*{message}"):
        Clients(simulated(tiny()), **clients).run(rule)


def test_label_counts_outlive_a_restart(tmp_path: Any) -> None:
    """The client that is absent in the last round registered before it."""
    federation, file = simulated(flaky()), tmp_path / "strategy.safetensors"
    _, whole = Clients(federation).run(fu.feddisco(), absent="remember")

    class Killed(BaseException):
        pass

    seen: list[int] = []

    def killed(report: ClientUpdates, state: Any) -> tuple[RoundDecision | torch.Tensor, Any]:
        seen.append(report.round)
        if report.round == ROUNDS - 1:
            raise Killed
        return fu.feddisco()(report, state)

    with pytest.raises(Killed):
        Clients(federation).run(fu.rules.Rule("feddisco", killed), absent="remember", checkpoint=file)
    assert seen == list(range(ROUNDS))
    _, resumed = Clients(federation).run(fu.feddisco(), absent="remember", checkpoint=file)
    assert torch.equal(resumed, whole)

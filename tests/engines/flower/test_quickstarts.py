"""Two apps written for FedAvg, with WeightedStrategy in its place: the same models and metrics, whoever is missing."""

import difflib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Result

import fedunfold as fu
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.engines.flower import WeightedStrategy
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from tests.engines.flower.apps.results import load_result
from tests.engines.flower.apps.sklearn_app.task import create_model, get_params
from tests.support.grid import LocalGrid
from tests.support.quickstarts import CLIENTS, NUM_NODES, ROUNDS, STRATEGIES, run_app, server_source
from tests.support.rules import small_rule

ROOT = Path(__file__).parents[3]
OURS = [name for name in STRATEGIES if name != "FedAvg"]
SILENT, LATE, JOINING = 10, 11, 12


def assert_same(folder: Path, app: str, ours: str) -> None:
    arrays, metrics = load_result(folder / app / ours)
    expected, expected_metrics = load_result(folder / app / "FedAvg")
    assert list(arrays) == list(expected)
    for name, values in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (values.dtype, values.shape)
        np.testing.assert_allclose(arrays[name], values, rtol=1e-6, atol=1e-6)
    assert {stage: list(rounds) for stage, rounds in metrics.items()} == {
        stage: list(rounds) for stage, rounds in expected_metrics.items()
    }
    for stage, rounds in expected_metrics.items():
        for t, found in rounds.items():
            assert metrics[stage][t] == pytest.approx(found, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("app", CLIENTS)
def test_two_lines_are_changed(app: str) -> None:
    theirs, ours = (server_source(app, STRATEGIES[name]).splitlines() for name in ("FedAvg", "size"))
    changes = [line for line in difflib.ndiff(theirs, ours) if line.startswith(("- ", "+ "))]
    assert sorted(changes) == [
        "+     strategy = fu.WeightedStrategy(fu.size(), min_available_nodes=3)",
        "+ import fedunfold as fu",
        "-     strategy = FedAvg(min_available_nodes=3)",
        "- from flwr.serverapp.strategy import FedAvg",
    ]


@pytest.mark.network
@pytest.mark.slow
def test_over_flowers_simulation(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.quickstarts", str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert said.count(f"aggregate_train: Received {NUM_NODES} results and 0 failures") == ROUNDS * 2 * len(STRATEGIES)
    for trouble in ("Traceback", "ERROR", "Error", "rejected", "no answer"):
        assert trouble not in said
    for app in CLIENTS:
        for ours in OURS:
            assert_same(tmp_path, app, ours)


class Unreliable(LocalGrid):
    """One node never answers; another's answers of the first round come after the time for it, when nobody asks for
    them any more; a third is connected from the second round on."""

    def __init__(self, app: str) -> None:
        super().__init__(CLIENTS[app], {10 + k: {"partition-id": k, "num-partitions": 5} for k in range(5)})
        self.spoil = lambda reply, node: None if node == SILENT else reply
        self.held: set[str] = set()
        self.told: list[Any] = []

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node != JOINING or any(told[0] == "evaluate" for told in self.told)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        ids = super().push_messages(sent)
        for id, message in zip(ids, sent, strict=True):
            content, node = message.content, message.metadata.dst_node_id
            configs = {name: dict(record) for name, record in content.config_records.items()}
            arrays = {name: list(record) for name, record in content.array_records.items()}
            self.told.append((message.metadata.message_type, node, configs, arrays, list(content.metric_records)))
            if configs["config"]["server-round"] == 1 and node == LATE:
                self.held.add(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages(id for id in message_ids if id not in self.held)


@pytest.mark.parametrize("app", CLIENTS)
def test_clients_that_never_answer_answer_late_or_come_late(
    app: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {}
    for name, strategy in STRATEGIES.items():
        grid = Unreliable(app)
        run_app(app, strategy, grid, tmp_path / app / name)
        told[name] = sorted(grid.told, key=str)
        assert len(grid.held & grid.replies.keys()) == 2, "the late answers are there, and were not pulled"
    for ours in OURS:
        assert_same(tmp_path, app, ours)
        assert told[ours] == told["FedAvg"]
    assert {entry[0] for entry in told["FedAvg"]} == {"train", "evaluate"}
    sent = [(configs["config"]["server-round"], node) for _, node, configs, _, _ in told["FedAvg"]]
    assert [sent.count((t, JOINING)) for t in (1, 2, 3)] == [0, 2, 2]
    assert "client node:10: no answer (round 0)" in caplog.text
    assert "client node:11: no answer (round 0)" in caplog.text
    assert "client node:12" not in caplog.text
    assert "Traceback" not in caplog.text


# --- a rule that decides on weights, step and momentum -----------------------------------------------------


def random_rule(seed: int = 1) -> UnfoldedRule:
    """With last layers that are not 0."""
    params, draw = initial_parameters(32, 0), torch.Generator().manual_seed(seed)
    for name in ("score.1.weight", "score.1.bias", "step.1.weight", "step.1.bias"):
        params[name] = 0.2 * torch.randn(params[name].shape, generator=draw, dtype=torch.float64)
    return UnfoldedRule(params)


@dataclass(frozen=True)
class Recording:
    """A rule whose decisions are written down."""

    rule: UnfoldedRule
    name: str = "recording"
    required_metrics: frozenset[Any] = frozenset()
    decisions: list[RoundDecision] = field(default_factory=list)
    horizons: list[int | None] = field(default_factory=list)

    def with_horizon(self, rounds: int | None) -> "Recording":
        self.horizons.append(rounds)
        return replace(self, rule=self.rule.with_horizon(rounds))

    def __call__(self, report: ClientUpdates, state: Any) -> Any:
        decision, state = self.rule(report, state)
        self.decisions.append(decision)
        return decision, state


def start(strategy: WeightedStrategy, app: str, rounds: int) -> tuple[Result, list[np.ndarray], list[dict[str, Any]]]:
    """The result on four reliable clients, the model sent in every round, and what each of them answered."""
    replies: list[dict[str, Any]] = []

    def note(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == "train":
            if not replies or f"node:{node}" in replies[-1]:
                replies.append({})
            replies[-1][f"node:{node}"] = flat(reply.content.array_records["arrays"])
        return reply

    nodes: dict[int, dict[str, Any]] = {k: {"partition-id": k, "num-partitions": 4} for k in range(4)}
    grid = LocalGrid(CLIENTS[app], nodes, note)
    result = strategy.start(grid, ArrayRecord(get_params(create_model())), num_rounds=rounds)
    models = [flat(m.content.array_records["arrays"]) for m in grid.sent if m.metadata.message_type == "train"]
    return result, models[:: len(nodes)], replies


def flat(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().reshape(-1) for array in arrays.values()])


def test_a_rule_with_parameters_trains() -> None:
    rule = Recording(random_rule())
    strategy = WeightedStrategy(rule)
    result, models, replies = start(strategy, "sklearn_app", rounds=5)
    assert rule.horizons == [5]
    losses = [found["train_logloss"] for found in result.train_metrics_clientapp.values()]
    assert losses[-1] < 0.8 * losses[0]  # type: ignore[operator]
    sizes = {f"node:{k}": (150 + 60 * k) * 4 // 5 for k in range(4)}
    direction = np.zeros_like(models[0])
    for t, (sent, decision, weights) in enumerate(zip(models, rule.decisions, strategy.weights, strict=True)):
        assert sum(weights.values()) == pytest.approx(1)
        assert any(abs(weights[name] - n / sum(sizes.values())) > 0.001 for name, n in sizes.items())
        assert decision.step != 1
        assert 0 < decision.momentum < 1
        mean = sum(weight * (replies[t][name] - sent) for name, weight in weights.items())
        direction = decision.step * mean + decision.momentum * direction
        after = [*models, flat(result.arrays)][t + 1]
        np.testing.assert_allclose(after, sent + direction, rtol=1e-9, atol=1e-12)


def test_a_rule_is_not_told_what_it_does_not_ask_for() -> None:
    strategy = WeightedStrategy(fu.size())
    start(strategy, "sklearn_app", rounds=1)
    assert strategy.rule.name == "size"
    told = UnfoldedRule(initial_parameters(8, 0))
    start(WeightedStrategy(told), "sklearn_app", rounds=1)
    assert told.horizon is None, "the rule that was given stays as it is"


def test_a_rule_with_parameters_when_a_client_changes_to_double_precision() -> None:
    """What the rule remembers of earlier rounds is compared with updates of another precision then."""
    nodes: dict[int, dict[str, Any]] = {k: {"partition-id": k, "num-partitions": 2} for k in range(2)}
    initial = ArrayRecord([values.astype(np.float32) for values in get_params(create_model())])

    def single(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == "train" and (node == 0 or len(strategy.weights) < 2):
            arrays = reply.content.array_records["arrays"].to_numpy_ndarrays()
            reply.content.array_records["arrays"] = ArrayRecord([values.astype(np.float32) for values in arrays])
        return reply

    strategy = WeightedStrategy(random_rule())
    result = strategy.start(LocalGrid(CLIENTS["sklearn_app"], nodes, single), initial, num_rounds=4)
    assert strategy.failures.as_dict() == {}
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


# --- a pre-trained rule ------------------------------------------------------------------------------------

PRETRAINED = "import fedunfold as fu", "fu.WeightedStrategy(fu.pretrained(), "


@pytest.mark.parametrize("app", CLIENTS)
def test_two_lines_bring_the_pre_trained_rule(app: str, tmp_path: Path) -> None:
    nodes = {k: {"partition-id": k, "num-partitions": 4} for k in range(4)}
    run_app(app, PRETRAINED, LocalGrid(CLIENTS[app], nodes), tmp_path, rounds=4)
    arrays, metrics = load_result(tmp_path)
    assert all(np.isfinite(values).all() for values in arrays.values())
    losses = [
        next(iter(v for name, v in found.items() if "loss" in name))
        for found in metrics["train_metrics_clientapp"].values()
    ]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("app", CLIENTS)
def test_the_pre_trained_rule_where_clients_never_answer_or_late(
    app: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It remembers those who answered once, and sends what FedAvg sends."""
    told = {}
    for name, strategy in {"FedAvg": STRATEGIES["FedAvg"], "pre-trained": PRETRAINED}.items():
        grid = Unreliable(app)
        run_app(app, strategy, grid, tmp_path / name, rounds=4)
        # The models differ, and so do their arrays' bytes; what is said of them does not.
        told[name] = sorted(grid.told, key=str)
    assert told["pre-trained"] == told["FedAvg"]
    arrays, metrics = load_result(tmp_path / "pre-trained")
    assert all(np.isfinite(values).all() for values in arrays.values())
    theirs, their_metrics = load_result(tmp_path / "FedAvg")
    assert [(n, a.dtype, a.shape) for n, a in arrays.items()] == [(n, a.dtype, a.shape) for n, a in theirs.items()]
    for stage, rounds in their_metrics.items():
        assert {t: sorted(found) for t, found in metrics[stage].items()} == {t: sorted(f) for t, f in rounds.items()}
    assert caplog.text.count("client node:10: no answer") == 4
    assert caplog.text.count("client node:11: no answer") == 1
    for trouble in ("Traceback", "rejected", "failed", "skipped"):
        assert trouble not in caplog.text


def test_a_pre_trained_rule_brings_its_server_unless_another_is_given(caplog: pytest.LogCaptureFixture) -> None:
    rule = small_rule()
    assert rule.algorithm is not None
    assert WeightedStrategy(rule).algorithm == rule.algorithm
    changed = WeightedStrategy(rule, server=fu.server.sgd(), absent="drop").algorithm
    assert (changed.server, changed.absent) == (fu.server.sgd(), "drop")
    assert rule.ranges is not None
    with caplog.at_level("WARNING", logger="fedunfold"):
        start(WeightedStrategy(rule), "sklearn_app", rounds=2)
        assert "unlike those" not in caplog.text
        start(WeightedStrategy(replace(rule, ranges=rule.ranges / 65)), "sklearn_app", rounds=2)
    assert caplog.text.count("the federation is unlike those that the rule was learned on") == 1

"""A server that is killed and started again with the same checkpoint ends as one that was not."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.engines.flower import WeightedStrategy
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from tests.engines.flower.test_quickstarts import random_rule
from tests.engines.flower.test_strategy import app_of, initial
from tests.rules.test_unfolded import without_last_layers
from tests.support.grid import LocalGrid

ROUNDS = 5
NODES: dict[int, dict[str, Any]] = {k: {"pull": 1.0 + k % 3, "n": 10 + k} for k in range(1, 7)}
KEYS = {k: f"client-{k}" for k in NODES}
STRATEGIES: dict[str, Any] = {
    "a rule with parameters": lambda: {"rule": random_rule()},
    "remembered updates and momentum": lambda: {"absent": "remember", "server": fu.server.momentum(0.5)},
    "fedadp under adam": lambda: {"rule": fu.fedadp(), "server": fu.adam(lr=0.05), "filter": "norm"},
}


class Killed(BaseException):
    """The server ends here."""


class MortalGrid(LocalGrid):
    """Node 6 answers every other round; the server is killed when it sends messages of a type in a round."""

    def __init__(self, killed: tuple[str, int] | None = None, *, registers: bool = True) -> None:
        super().__init__(app_of(KEYS if registers else None), NODES)
        self.killed = killed
        self.trained: set[int] = set()  # noted at once: FedAvg changes the number in what it has sent

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        for message in sent:
            t = message.content.config_records["config"]["server-round"]
            assert isinstance(t, int)
            kind = message.metadata.message_type
            if (kind, t) == self.killed:
                raise Killed
            if kind == "train":
                self.trained.add(t)
            self.spoil = lambda reply, node, t=t: None if node == 6 and t % 2 == 0 else reply
        return super().push_messages(sent)


@pytest.fixture(autouse=True)
def everybody_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower draws the order of nodes; sums depend on it in the last bit."""
    monkeypatch.setattr("flwr.serverapp.strategy.fedavg.sample_nodes", lambda *_: (list(NODES), list(NODES)))


def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"mean": float(arrays["w"].numpy().mean()), "round": server_round})


def start(grid: LocalGrid, rounds: int = ROUNDS, arrays: ArrayRecord | None = None, **settings: Any) -> Any:
    strategy = WeightedStrategy(**settings)
    return strategy, strategy.start(grid, arrays or initial(), num_rounds=rounds, evaluate_fn=evaluated)


def parts(strategy: WeightedStrategy, result: Result) -> Any:
    """Everything that a run ends with, to the bit."""
    stages = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp)
    metrics = [{t: dict(found) for t, found in stage.items()} for stage in stages]
    arrays = {name: (array.dtype, array.numpy().tobytes()) for name, array in result.arrays.items()}
    return arrays, metrics, strategy.weights, strategy.failures.as_dict()


@pytest.mark.parametrize("killed", [("train", 2), ("train", 4), ("evaluate", 3)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_as_if_uninterrupted(name: str, killed: tuple[str, int], tmp_path: Path) -> None:
    file, settings = tmp_path / "run" / "strategy.safetensors", STRATEGIES[name]
    expected = parts(*start(MortalGrid(), **settings()))
    with pytest.raises(Killed):
        start(MortalGrid(killed), checkpoint=file, **settings())
    grid = MortalGrid()
    assert parts(*start(grid, checkpoint=file, **settings())) == expected
    first = 1 + (killed[1] - 1 if killed[0] == "train" else killed[1])
    assert grid.trained == set(range(first, ROUNDS + 1)), "rounds of before are not carried out again"
    assert sorted(path.name for path in file.parent.iterdir()) == [
        "strategy-before.safetensors",
        "strategy.safetensors",
    ]


def test_killed_again_and_again_and_clients_known_by_their_nodes(tmp_path: Path) -> None:
    file, rule = tmp_path / "strategy.safetensors", random_rule()
    expected = parts(*start(MortalGrid(registers=False), rule=rule, absent="remember"))
    for killed in range(1, ROUNDS + 1):
        with pytest.raises(Killed):
            start(MortalGrid(("train", killed), registers=False), rule=rule, absent="remember", checkpoint=str(file))
    found = start(MortalGrid(registers=False), rule=rule, absent="remember", checkpoint=str(file))
    assert parts(*found) == expected


def test_a_new_initial_model_does_not_matter_and_a_finished_run_stays(tmp_path: Path) -> None:
    """Apps draw one at every start."""
    file = tmp_path / "strategy.safetensors"
    expected = parts(*start(MortalGrid(), rule=fu.uniform(), checkpoint=file))
    other = ArrayRecord({name: Array(array.numpy() + 1) for name, array in initial().items()})
    grid = MortalGrid()
    assert parts(*start(grid, arrays=other, rule=fu.uniform(), checkpoint=file)) == expected
    assert {message.metadata.message_type for message in grid.sent} == {"evaluate"}


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "strategy.safetensors"
    start(MortalGrid(), rule=random_rule(1), checkpoint=file)
    with pytest.raises(InputError, match=r"strategy.safetensors is of another run \(parameters was"):
        start(MortalGrid(), rule=random_rule(2), checkpoint=file)
    with pytest.raises(InputError, match=r"of another run \(horizon was 5 and is 4\)"):
        start(MortalGrid(), rounds=4, rule=random_rule(1), checkpoint=file)
    with pytest.raises(InputError, match=r"of another run \(algorithm.absent was drop and is keep\)"):
        start(MortalGrid(), rule=random_rule(1), absent="keep", checkpoint=file)
    with pytest.raises(InputError, match=r"of another run \(arrays.w\[0\] was 2 and is 4\)"):
        larger = ArrayRecord({**initial(), "w": Array(np.zeros((4, 3), np.float32))})
        start(MortalGrid(), arrays=larger, rule=random_rule(1), checkpoint=file)
    short = tmp_path / "short.safetensors"
    start(MortalGrid(), checkpoint=short)
    with pytest.raises(InputError, match="holds 5 rounds, more than the 3 requested"):
        start(MortalGrid(), rounds=3, checkpoint=short)


def test_a_damaged_file_is_noticed_and_the_one_before_it_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "strategy.safetensors"
    expected = parts(*start(MortalGrid(), checkpoint=file))
    file.write_bytes(file.read_bytes()[:-3])
    assert parts(*start(MortalGrid(), checkpoint=file)) == expected
    assert "is damaged; resuming from the one before it" in caplog.text


def test_a_state_that_cannot_be_saved_is_an_error_at_once(tmp_path: Path) -> None:
    @fu.rule()
    def odd(report: Any, state: Any) -> Any:
        return report.num_examples / report.num_examples.sum(), {1, 2}

    with pytest.raises(InputError, match="not of set"):
        start(MortalGrid(), rule=odd, checkpoint=tmp_path / "strategy.safetensors")


def test_a_pretrained_rule_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """With what it remembers of clients, the server's second moments, and notes of features out of range."""
    file = tmp_path / "strategy.safetensors"
    for mark in (2, 4):
        with pytest.raises(Killed):
            start(MortalGrid(("train", mark)), rule=fu.pretrained(), checkpoint=file)
    _, ours = start(MortalGrid(), rule=fu.pretrained(), checkpoint=file)
    _, theirs = start(MortalGrid(), rule=fu.pretrained())
    assert ours.arrays["w"].numpy().tobytes() == theirs.arrays["w"].numpy().tobytes()


def test_parameters_without_a_decision_are_fedavg_over_a_restart(tmp_path: Path) -> None:
    params = without_last_layers(initial_parameters(32, 0))
    file, rule = tmp_path / "strategy.safetensors", UnfoldedRule(params)
    with pytest.raises(Killed):
        start(MortalGrid(("train", 3)), rule=rule, checkpoint=file)
    _, ours = start(MortalGrid(), rule=rule, checkpoint=file)
    _, theirs = start(MortalGrid(), rule=fu.size())
    np.testing.assert_allclose(ours.arrays["w"].numpy(), theirs.arrays["w"].numpy(), rtol=1e-6)

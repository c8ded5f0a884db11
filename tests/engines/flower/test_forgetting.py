"""What a strategy remembers of clients that come back as others, or not at all, does not grow without bound."""

from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.engines.flower import WeightedStrategy
from tests.engines.flower.test_strategy import app_of, initial, start
from tests.support.grid import LocalGrid

ROUNDS, CLIENTS = 30, 100


def changing(strategy: WeightedStrategy, rounds: int, clients: int = CLIENTS, **app: Any) -> list[tuple[int, int]]:
    """All nodes are others in every round; how many updates and how many clients are known after each."""
    grid = LocalGrid(app_of(**app), nodes_of(0, clients))
    known: list[tuple[int, int]] = []

    def next_nodes(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        run = strategy._run
        assert run is not None
        if server_round:
            known.append((len(run.server.memory), len(run.roster.num_examples)))
        grid.nodes.clear()
        grid.nodes.update(nodes_of(server_round, clients))
        return MetricRecord()

    strategy.start(grid, initial(), num_rounds=rounds, evaluate_fn=next_nodes)
    return known


def nodes_of(t: int, clients: int) -> dict[int, dict[str, Any]]:
    return {1000 * t + k: {"pull": 2.0, "n": 10} for k in range(1, clients + 1)}


def test_clients_without_a_lasting_id_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """100 nodes, others in each of 30 rounds: those of this round and of the five before it count."""
    known = changing(WeightedStrategy(absent="remember", fraction_evaluate=0.0), ROUNDS)
    assert known[:6] == [(CLIENTS * t, CLIENTS * t) for t in (1, 2, 3, 4, 5, 6)]
    assert set(known[5:]) == {(6 * CLIENTS, 6 * CLIENTS)}
    assert "the updates of 100 clients are no longer remembered, because their nodes left" in caplog.text
    assert "have clients register with registration_mod" in caplog.text


@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_nor_does_the_list_of_clients_grow(absent: Any) -> None:
    known = changing(WeightedStrategy(absent=absent, fraction_evaluate=0.0, remember_rounds=1), 6, 10)
    assert known == [(0, 10), *5 * [(0, 20)]]


def test_ghosts_no_longer_contribute() -> None:
    """Node 3 answers in the first round and is gone then; its update, 2, counts for as long as it is remembered."""
    nodes: dict[int, dict[str, Any]] = {1: {"pull": 1.0, "n": 10}, 2: {"pull": 1.0, "n": 10}, 3: {"pull": 4.0, "n": 10}}
    grid = LocalGrid(app_of(), dict(nodes))
    models: list[float] = []

    def leave(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        grid.nodes.pop(3, None) if server_round else None
        models.append(float(arrays["b"].numpy()[0]))
        return MetricRecord()

    strategy = WeightedStrategy(fu.uniform(), absent="remember", remember_rounds=2, fraction_evaluate=0.0)
    strategy.start(grid, initial(), num_rounds=5, evaluate_fn=leave)
    w, expected = 0.0, []
    for t in range(5):
        ghost = [2.0] if t <= 2 else []
        w += sum([(1 - w) / 2, (1 - w) / 2, *ghost]) / (2 + len(ghost))
        expected.append(w)
    assert models[1:] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("registers", [True, False])
def test_registered_clients_are_remembered_and_so_are_nodes_that_stay(registers: bool) -> None:
    """They are absent from the second round on, and connected or known by a lasting id."""
    keys = {1: "ann", 2: "bob"}
    nodes: dict[int, dict[str, Any]] = {node: {"pull": 2.0, "n": 10} for node in (1, 2)}
    strategy = WeightedStrategy(absent="remember", remember_rounds=0)

    def spoil(reply: Message, node: int) -> Message | None:
        return None if node == 2 and reply.metadata.message_type == "train" and strategy.weights else reply

    start(strategy, LocalGrid(app_of(keys if registers else None), dict(nodes), spoil), rounds=8)
    assert strategy._run is not None
    assert sorted(strategy._run.server.memory) == [0, 1]


def test_no_more_clients_are_remembered_than_allowed(caplog: pytest.LogCaptureFixture) -> None:
    known = changing(WeightedStrategy(absent="remember", fraction_evaluate=0.0, remember_clients=25), 5, 10)
    assert known == [(10, 10), (20, 20), (25, 30), (25, 40), (25, 50)]
    assert "those of 25 are at most; raise remember_clients" in caplog.text


def test_what_is_remembered_stays_with_its_client_when_others_are_forgotten() -> None:
    """Memory goes by position, and positions move up."""
    nodes: dict[int, dict[str, Any]] = {1: {"pull": 9.0, "n": 1}, 2: {"pull": 2.0, "n": 1}, 3: {"pull": 4.0, "n": 1}}
    grid = LocalGrid(app_of(), dict(nodes))
    strategy = WeightedStrategy(absent="remember", remember_rounds=0, fraction_evaluate=0.0)

    def leave(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            run = strategy._run
            assert run is not None
            order = list(run.roster.num_examples)
            grid.nodes.pop(int(order[0].removeprefix("node:")))
            first = {name: float(run.server.memory[k][0]) for k, name in enumerate(order)}
            strategy.__dict__["first"] = {name: first[name] for name in order[1:]}
            grid.spoil = lambda reply, node: None
        return MetricRecord()

    strategy.start(grid, initial(), num_rounds=2, evaluate_fn=leave)
    run = strategy._run
    assert run is not None
    found = {name: float(run.server.memory[k][0]) for k, name in enumerate(run.roster.num_examples)}
    assert found == strategy.__dict__["first"] and len(found) == 2


def test_one_update_of_each_client_is_held_also_where_a_round_comes_to_nothing() -> None:
    """The rule fails in the second round; what clients sent then is what the third remembers of them."""

    @fu.rule()
    def breaks(report: Any, state: Any) -> Any:
        assert strategy._run is not None
        held.append(dict(strategy._run.server.memory))
        share = report.num_examples / report.num_examples.sum()
        return share * (2 if report.round == 1 else 1), state

    held: list[dict[int, Any]] = []
    nodes: dict[int, dict[str, Any]] = {node: {"pull": 2.0, "n": 10} for node in (1, 2)}
    strategy = WeightedStrategy(breaks, absent="remember", fraction_evaluate=0.0)

    def spoil(reply: Message, node: int) -> Message | None:
        return None if len(strategy.weights) == 2 and node == 2 else reply

    result = start(strategy, LocalGrid(app_of(), nodes, spoil), rounds=3)
    assert strategy.weights[1] == {}
    # From 0 to 1, as each moves half the way to 2; then 1/2, twice, of which only the third round makes a step.
    assert [sorted(float(row[0]) for row in rows.values()) for rows in held] == [[1, 1], [0.5, 0.5], [0.5, 0.5]]
    assert float(result.arrays["b"].numpy()[0]) == 1.5


@pytest.mark.parametrize("settings", [{"remember_clients": 0}, {"remember_rounds": -1}])
def test_impossible_limits_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InputError, match="needs remember_clients >= 1 and remember_rounds >= 0"):
        WeightedStrategy(**settings)  # type: ignore[arg-type]

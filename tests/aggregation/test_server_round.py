"""What a rule may decide beside weights, by hand, and what the server's optimiser is shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedunfold.aggregation import median
from fedunfold.aggregation.server_round import ServerState, aggregate
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import RoundDecision, RoundInfo, ServerOptimizer, State
from fedunfold.server import momentum, sgd
from tests.support.reports import aggregate_one, report

HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def both(t: int, *updates: Sequence[float]) -> ClientUpdates:
    return report([1, 3], round=t, updates=torch.tensor(updates, dtype=torch.float64))


def test_two_rounds_with_a_step_and_a_momentum_by_hand() -> None:
    """Means (1, 0) and (0, 2). u⁰ = 2 (1, 0), there being no direction before it; u¹ = 3 (0, 2) + ½ u⁰ = (1, 6)."""
    algorithm = Algorithm()
    server = ServerState.start(vector(10, 20), algorithm)
    server, first = aggregate_one(server, both(0, [2, 0], [0, 0]), RoundDecision(HALVES, 2.0, 0.5), algorithm)
    assert first.direction is not None
    assert first.direction.tolist() == [2, 0]
    assert server.model.tolist() == [12, 20]
    server, second = aggregate_one(server, both(1, [0, 4], [0, 0]), RoundDecision(HALVES, 3.0, 0.5), algorithm)
    assert second.direction is not None
    assert second.direction.tolist() == [1, 6]
    assert server.model.tolist() == [13, 26]


def test_trust_lies_between_plain_averaging_and_the_servers_step() -> None:
    """Plain averaging moves by (1, 0), a server with η = 5 by (5, 0): a quarter of the way is (2, 0)."""
    algorithm = Algorithm(server=sgd(5.0))
    for trust, moved in ((0.0, 1), (0.25, 2), (1.0, 5)):
        server = ServerState.start(vector(10, 20), algorithm)
        server, _ = aggregate_one(server, both(0, [2, 0], [0, 0]), RoundDecision(HALVES, trust=trust), algorithm)
        assert server.model.tolist() == [10 + moved, 20]


def test_the_scale_multiplies_the_model_and_not_the_update() -> None:
    """Weights (½, ½) of (2, 0) and (0, 4) from (10, 20): ½ (11, 22), and the direction of the round is (1, 2)."""
    algorithm = Algorithm()
    server = ServerState.start(vector(10, 20), algorithm)
    server, found = aggregate_one(server, both(0, [2, 0], [0, 4]), RoundDecision(HALVES, scale=0.5), algorithm)
    assert server.model.tolist() == [5.5, 11]
    assert found.direction is not None and found.direction.tolist() == [1, 2]
    assert server.direction is not None and server.direction.tolist() == [1, 2]


def test_the_scale_comes_after_the_servers_step() -> None:
    """A server with η = 5 moves by (5, 0): 2 (15, 20)."""
    algorithm = Algorithm(server=sgd(5.0))
    server = ServerState.start(vector(10, 20), algorithm)
    server, _ = aggregate_one(server, both(0, [2, 0], [0, 0]), RoundDecision(HALVES, scale=2.0), algorithm)
    assert server.model.tolist() == [30, 40]


def test_buffers_are_not_scaled() -> None:
    layout = ParamLayout(("w",), (torch.Size([1]),), ("b",), (torch.Size([1]),))
    algorithm = Algorithm()
    server = ServerState.start(vector(10, 20), algorithm)
    given = replace(both(0, [2, 4], [0, 0]), layout=layout)
    server, _ = aggregate_one(server, given, RoundDecision(HALVES, scale=0.5), algorithm)
    assert server.model.tolist() == [5.5, 22]


def test_where_nobody_is_there_to_drop_nothing_is_scaled() -> None:
    algorithm = Algorithm(absent="drop")
    server = ServerState.start(vector(10, 20), algorithm)
    nobody = report([1, 3], participated=[False, False], updates=torch.zeros(0, 2, dtype=torch.float64))
    after, _ = aggregate_one(server, nobody, RoundDecision(HALVES, scale=0.5), algorithm)
    assert after is server


def test_a_direction_made_without_momentum_is_there_for_the_next_round() -> None:
    """u⁰ = 1, u¹ = 1 + 0 u⁰, u² = 1 + ½ u¹."""
    algorithm = Algorithm()
    server = ServerState.start(vector(0, 0), algorithm)
    for t, beta in enumerate((0.5, 0.0, 0.5)):
        server, _ = aggregate_one(server, both(t, [2, 2], [0, 0]), RoundDecision(HALVES, 1.0, beta), algorithm)
    assert server.model.tolist() == [1 + 1 + 1.5] * 2


def test_a_constant_decision_is_the_servers_own_momentum() -> None:
    """u ← m + β u added to w is FedAvgM."""
    rounds = [both(0, [2, 0], [0, 1]), both(1, [0, 4], [1, 0]), both(2, [1, 1], [0, 0])]
    servers = {}
    for name, optimizer, decision in (
        ("rule", sgd(), RoundDecision(HALVES, 1.0, 0.7)),
        ("server", momentum(0.7), RoundDecision(HALVES)),
    ):
        algorithm = Algorithm(server=optimizer)
        server = ServerState.start(vector(0, 0), algorithm)
        for updates in rounds:
            server, _ = aggregate_one(server, updates, decision, algorithm)
        servers[name] = server.model
    torch.testing.assert_close(servers["rule"], servers["server"])


def test_step_sizes_of_the_algorithm_and_the_rule_multiply() -> None:
    algorithm = Algorithm(step_sizes=(0.5, 2.0))
    server = ServerState.start(vector(0, 0), algorithm)
    for t in range(3):  # the last step size repeats
        server, _ = aggregate_one(server, both(t, [2, 0], [0, 0]), RoundDecision(HALVES, 3.0), algorithm)
    assert server.model.tolist() == [3 * (0.5 + 2 + 2), 0]


def test_model_and_direction_stay_where_nobody_participates_under_drop() -> None:
    algorithm = Algorithm(absent="drop")
    server = ServerState.start(vector(0, 0), algorithm)
    decision = RoundDecision(HALVES, 1.0, 0.5)
    server, _ = aggregate_one(server, both(0, [2, 0], [2, 0]), decision, algorithm)
    nobody = report([1, 3], round=1, participated=[False, False], updates=torch.zeros(0, 2, dtype=torch.float64))
    after, aggregated = aggregate_one(server, nobody, decision, algorithm)
    assert after is server
    assert aggregated.direction is None
    after, _ = aggregate_one(after, both(2, [0, 1], [0, 1]), decision, algorithm)
    assert after.model.tolist() == [2 + 1, 1]


@dataclass(frozen=True)
class Watching(ServerOptimizer):
    """Plain averaging that notes what it is shown."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[RoundInfo]] = []

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        assert info is not None
        self.seen.append(info)
        return model + direction, ()


def test_what_a_server_optimizer_is_shown() -> None:
    algorithm = Algorithm(server=Watching())
    layout = ParamLayout(names=("w",), shapes=(torch.Size([2]),))
    found = report([1, 3, 4], round=5, participated=[True, False, True])
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    updates = OpenUpdates(torch.tensor([0, 2]), rows, rows.norm(dim=1))
    found = replace(found, updates=updates, num_steps=torch.tensor([6, 0, 7]), layout=layout)
    Watching.seen.clear()
    aggregate_one(ServerState.start(vector(0, 0), algorithm), found, vector(0.5, 0.3, 0.2), algorithm)
    (info,) = Watching.seen
    assert (info.round, info.layout) == (5, layout)
    assert info.coefficients.tolist() == [0.5, 0.2]
    assert info.norms is not None and info.norms.tolist() == [5, 1]
    assert info.num_examples.tolist() == [1, 4]
    assert info.num_steps.tolist() == [6, 7]


def test_several_runs_at_once_are_each_alone() -> None:
    algorithm = Algorithm(server=momentum(0.5), absent="remember")
    servers = [ServerState.start(vector(start, 0), algorithm) for start in (0.0, 5.0)]
    reports = [both(0, [2, 0], [0, 1]), both(0, [1, 1], [3, 3])]
    decisions = [RoundDecision(HALVES), RoundDecision(vector(0.25, 0.75), 2.0)]
    done = aggregate(servers, reports, decisions, algorithm)
    alone = [aggregate_one(*of_run, algorithm) for of_run in zip(servers, reports, decisions, strict=True)]
    for (together, _), (single, _) in zip(done, alone, strict=True):
        assert torch.equal(together.model, single.model)


def test_a_model_that_is_not_finite_is_an_error_with_its_round() -> None:
    algorithm = Algorithm()
    server = ServerState.start(vector(0, 0), algorithm)
    with pytest.raises(DivergenceError, match=r"round 4: the aggregated model is not finite; lower the learning rate"):
        aggregate_one(server, both(4, [math.inf, 0], [0, 0]), HALVES, algorithm)


def test_an_aggregator_gets_the_coefficients_of_the_cohort() -> None:
    """a and c are sampled, with weights ½ and ¼: the weighted median of 2 and 8 is the first of them."""
    algorithm = Algorithm(aggregator=median())
    rows = torch.tensor([[2.0], [8.0]], dtype=torch.float64)
    found = report([1, 1, 1], cohort=[True, False, True], updates=rows)
    server, _ = aggregate_one(ServerState.start(vector(0), algorithm), found, vector(0.5, 0.25, 0.25), algorithm)
    assert server.model.tolist() == pytest.approx([2])

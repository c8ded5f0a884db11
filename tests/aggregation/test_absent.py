"""Rounds aggregated by hand, for every way to treat absent clients, and with sampled cohorts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.aggregation.absent import RememberedUpdates, coefficients, eligible_clients
from fedunfold.aggregation.server_round import ServerState
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, OpenSum
from fedunfold.server import adam
from tests.support.reports import aggregate_one, report

WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
A, B, C = [2.0, 0.0], [1.0, 1.0], [0.0, 10.0]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def round_of(t: int, updates: dict[str, list[float]], cohort: str = "abc") -> ClientUpdates:
    """Clients a, b and c, of whom those with an update participate."""
    rows = torch.tensor([updates[key] for key in sorted(updates)], dtype=torch.float64).reshape(-1, 2)
    participated, sampled = [key in updates for key in "abc"], [key in cohort for key in "abc"]
    return report([1, 1, 1], round=t, participated=participated, cohort=sampled, updates=rows)


def models(
    absent: Absent,
    rounds: Sequence[dict[str, list[float]]],
    weights: Tensor = WEIGHTS,
    cohorts: Sequence[str] = (),
) -> list[list[float]]:
    """w after every round, from w = (1, 1)."""
    algorithm = Algorithm(absent=absent)
    server = ServerState.start(vector(1, 1), algorithm)
    found = []
    for t, updates in enumerate(rounds):
        server, _ = aggregate_one(server, round_of(t, updates, cohorts[t] if cohorts else "abc"), weights, algorithm)
        found.append(server.model.tolist())
    return found


ROUNDS = [{"b": B}, {"a": A, "c": C}, {}, {"b": [0.0, -10.0]}]


def test_keep() -> None:
    # Σ Θ_k w_k with w_k = w for the absent: + 0.3 b, + 0.5 a + 0.2 c, nothing, + 0.3 (0, −10).
    expected = [[1.3, 1.3], [2.3, 3.3], [2.3, 3.3], [2.3, 0.3]]
    assert [pytest.approx(w) for w in expected] == models("keep", ROUNDS)


def test_drop() -> None:
    # + b, + (5/7) a + (2/7) c, nothing, + (0, −10).
    expected = [[2, 2], [2 + 10 / 7, 2 + 20 / 7], [2 + 10 / 7, 2 + 20 / 7], [2 + 10 / 7, 20 / 7 - 8]]
    assert [pytest.approx(w) for w in expected] == models("drop", ROUNDS)


def test_remember() -> None:
    # + 0.3 b (a and c have sent nothing yet), + 0.5 a + 0.3 b + 0.2 c twice, then b's new one in its place.
    expected = [[1.3, 1.3], [2.6, 3.6], [3.9, 5.9], [4.9, 4.9]]
    assert [pytest.approx(w) for w in expected] == models("remember", ROUNDS)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_everybody_participates(absent: Absent) -> None:
    assert models(absent, [{"a": A, "b": B, "c": C}]) == [pytest.approx([2.3, 3.3])]


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_nobody_participates(absent: Absent) -> None:
    assert models(absent, [{}, {}]) == [[1, 1], [1, 1]]


def test_participating_clients_without_weight_move_nothing_under_drop() -> None:
    assert models("drop", [{"b": B, "c": C}], vector(1, 0, 0)) == [[1, 1]]


def test_a_remembered_update_lasts_while_others_come_and_go() -> None:
    rounds = [{"a": A}, {"c": C}, {"c": [0.0, 5.0]}]
    assert models("remember", rounds) == [[2, 1], [3, 3], [4, 4]]


def test_memory_holds_the_last_update_of_everybody() -> None:
    algorithm = Algorithm(absent="remember")
    server = ServerState.start(vector(1, 1), algorithm)
    server, _ = aggregate_one(server, round_of(0, {"a": A, "c": C}), WEIGHTS, algorithm)
    server, aggregated = aggregate_one(server, round_of(1, {"c": B}), WEIGHTS, algorithm)
    assert isinstance(aggregated.entered, OpenSum)
    entering = aggregated.entered.updates
    assert isinstance(entering, RememberedUpdates)
    assert entering.clients.tolist() == aggregated.entered.clients.tolist() == [0, 2]
    assert entering.rows.tolist() == [A, B]
    assert {k: last.tolist() for k, last in server.memory.items()} == {0: A, 2: B}


def test_only_the_dropping_server_rests_without_clients() -> None:
    """Adam's momentum continues under `keep`; under `drop` its state and the model stay as they are."""
    choices: list[tuple[Absent, bool]] = [("keep", False), ("remember", False), ("drop", True)]
    for absent, rests in choices:
        algorithm = Algorithm(server=adam(0.1), absent=absent)
        server = ServerState.start(vector(1, 1), algorithm)
        server, _ = aggregate_one(server, round_of(0, {"a": A}), WEIGHTS, algorithm)
        after, aggregated = aggregate_one(server, round_of(1, {}), WEIGHTS, algorithm)
        assert torch.equal(after.model, server.model) == rests
        assert all(map(torch.equal, after.optimizer, server.optimizer)) == rests
        assert (aggregated.direction is None) == rests


def test_adam_gets_the_direction() -> None:
    algorithm = Algorithm(server=adam(0.1, beta1=0.5, beta2=0.5, tau=1.0))
    server = ServerState.start(vector(0, 0), algorithm)
    server, _ = aggregate_one(server, round_of(0, {"a": [4.0, 0.0]}), WEIGHTS, algorithm)
    # u = 2: m = 1, v = ½ + 2 = 2.5
    assert server.model.tolist() == pytest.approx([0.1 / (2.5**0.5 + 1), 0])


def test_dropped_coefficients_carry_their_normalisation_to_the_weights() -> None:
    weights = WEIGHTS.clone().requires_grad_()
    eligible = eligible_clients(round_of(0, {"a": A, "c": C}), "drop")
    alpha = coefficients(weights, eligible)
    assert alpha.tolist() == pytest.approx([5 / 7, 0, 2 / 7])
    # α_a = Θ_a/(Θ_a + Θ_c): ∂α_a/∂Θ_a = Θ_c/0.49, ∂α_a/∂Θ_c = −Θ_a/0.49
    (slope,) = torch.autograd.grad(alpha[0], weights)
    assert slope.tolist() == pytest.approx([0.2 / 0.49, 0, -0.5 / 0.49])


def test_other_coefficients_are_the_weights() -> None:
    nobody = round_of(0, {})
    choices: list[Absent] = ["keep", "remember"]
    for absent in choices:
        assert torch.equal(coefficients(WEIGHTS, eligible_clients(nobody, absent)), WEIGHTS)
    assert coefficients(WEIGHTS, eligible_clients(nobody, "drop")).tolist() == [0, 0, 0]


def test_unknown_semantics_are_refused() -> None:
    with pytest.raises(InputError, match="'forget'; choose keep, drop or remember"):
        Algorithm(absent="forget")  # type: ignore[arg-type]


# --- sampled cohorts ---------------------------------------------------------------------------------------

# a and b are sampled, of whom b cannot be reached; then b and c, who both can; then c, who cannot.
SAMPLED: list[dict[str, list[float]]] = [{"a": A}, {"b": B, "c": C}, {}]
COHORTS = ("ab", "bc", "c")


@pytest.mark.parametrize(
    ("absent", "alphas"),
    [
        # Θ = (5, 3, 2)/10 over a and b; over b and c; c alone, whose model is unchanged.
        ("keep", [[5 / 8, 3 / 8, 0], [0, 3 / 5, 2 / 5], [0, 0, 1]]),
        # Over who participates: a; b and c; nobody.
        ("drop", [[1, 0, 0], [0, 3 / 5, 2 / 5], [0, 0, 0]]),
        # Over the cohort and all that are remembered: a and b; everybody, as a is remembered; everybody.
        ("remember", [[5 / 8, 3 / 8, 0], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]),
    ],
)
def test_coefficients_are_over_the_cohort(absent: Absent, alphas: list[list[float]]) -> None:
    algorithm = Algorithm(absent=absent)
    server = ServerState.start(vector(1, 1), algorithm)
    for t, (updates, cohort) in enumerate(zip(SAMPLED, COHORTS, strict=True)):
        server, aggregated = aggregate_one(server, round_of(t, updates, cohort), WEIGHTS, algorithm)
        assert coefficients(WEIGHTS, aggregated.eligible).tolist() == pytest.approx(alphas[t])


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ("keep", [[1 + 5 / 4, 1], [1 + 5 / 4 + 3 / 5, 1 + 3 / 5 + 4], [1 + 5 / 4 + 3 / 5, 1 + 3 / 5 + 4]]),
        ("drop", [[3, 1], [3 + 3 / 5, 1 + 3 / 5 + 4], [3 + 3 / 5, 1 + 3 / 5 + 4]]),
        # The third round adds the mean of all three again.
        ("remember", [[1 + 5 / 4, 1], [1 + 5 / 4 + 1.3, 3.3], [1 + 5 / 4 + 2.6, 5.6]]),
    ],
)
def test_models_of_sampled_rounds_by_hand(absent: Absent, expected: list[list[float]]) -> None:
    assert [pytest.approx(w) for w in expected] == models(absent, SAMPLED, cohorts=COHORTS)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_a_sampled_cohort_that_is_reached_takes_a_full_step(absent: Absent) -> None:
    """Not sampled is not absent: equal updates move the model by one of them, whoever is sampled."""
    rounds: list[dict[str, list[float]]] = [{"a": B}, {"b": B, "c": B}, {"c": B}]
    assert models(absent, rounds, cohorts=("a", "bc", "c")) == [pytest.approx([1.0 + t] * 2) for t in (1, 2, 3)]


def test_a_cohort_without_weight_moves_nothing() -> None:
    assert models("keep", [{"b": B}], vector(1, 0, 0), cohorts=("bc",)) == [[1, 1]]


def test_coefficients_of_a_cohort_carry_their_normalisation_to_the_weights() -> None:
    weights = WEIGHTS.clone().requires_grad_()
    alpha = coefficients(weights, eligible_clients(round_of(0, {"a": A}, "ac"), "keep"))
    (slope,) = torch.autograd.grad(alpha[0], weights)
    assert slope.tolist() == pytest.approx([0.2 / 0.49, 0, -0.5 / 0.49])


@given(st.permutations(range(4)), st.data())
def test_permuting_the_clients_permutes_the_coefficients(order: Sequence[int], data: Any) -> None:
    marks = st.lists(st.booleans(), min_size=4, max_size=4)
    cohort, reached = data.draw(marks), data.draw(marks)
    participated = [sampled and here for sampled, here in zip(cohort, reached, strict=True)]
    memory = {k: torch.zeros(2) for k, known in enumerate(data.draw(marks)) if known or participated[k]}
    weights = torch.tensor(data.draw(st.lists(st.floats(0.1, 1), min_size=4, max_size=4)), dtype=torch.float64)
    weights = weights / weights.sum()
    listed = report([1] * 4, cohort=cohort, participated=participated)
    relisted = report([1] * 4, cohort=[cohort[k] for k in order], participated=[participated[k] for k in order])
    choices: list[Absent] = ["keep", "drop", "remember"]
    for absent in choices:
        before = replace(listed, remembered=RememberedUpdates(memory, torch.zeros(0, 2)))
        alpha = coefficients(weights, eligible_clients(before, absent))
        remembered = {place: memory[k] for place, k in enumerate(order) if k in memory}
        after = replace(relisted, remembered=RememberedUpdates(remembered, torch.zeros(0, 2)))
        again = coefficients(weights[list(order)], eligible_clients(after, absent))
        torch.testing.assert_close(again, alpha[list(order)])
        assert float(alpha.sum()) == pytest.approx(1 if any(alpha) else 0)

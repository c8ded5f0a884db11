import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.rules import afl, size
from fedunfold.rules.afl import project_to_simplex
from fedunfold.training.loop import run_rounds
from tests.support.federations import label_skewed, simulated
from tests.support.reports import report, weigh


@settings(deadline=None)  # the first call into torch is slow
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_the_projection_is_the_nearest_point(values: list[float]) -> None:
    """Against the threshold found by bisection, which the sum over the simplex determines."""
    found = project_to_simplex(torch.tensor(values, dtype=torch.float64))
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(0, v - middle) for v in values) > 1 else (low, middle)
    assert found.tolist() == pytest.approx([max(0, v - low) for v in values], abs=1e-9)


def test_the_projection_of_numbers_beside_which_one_vanishes() -> None:
    assert project_to_simplex(torch.tensor([1e30, 1e30, 0.0], dtype=torch.float64)).tolist() == [0.5, 0.5, 0.0]
    assert project_to_simplex(torch.tensor([0.2, 0.8], dtype=torch.float64)).tolist() == pytest.approx([0.2, 0.8])


def test_worked_case_over_two_rounds() -> None:
    rule = afl(gamma=0.5)
    # (1/3 + 0.1, 1/3 + 0.2, 1/3 + 0.6) − 0.3
    weights, state = weigh(rule, report([90, 5, 5], start_loss=[0.2, 0.4, 1.2]))
    assert weights.tolist() == pytest.approx([2 / 15, 7 / 30, 19 / 30], abs=1e-6)
    # b is absent: λ + γF = (2/15 + 0.1, 7/30, 19/30 + 0.5) = (0.2333, 0.2333, 1.1333) loses 0.2 from each.
    late = report([90, 5, 5], round=1, participated=[True, False, True], start_loss=[0.2, 9.0, 1.0])
    weights, state = weigh(rule, late, state)
    assert state == pytest.approx({"a": 1 / 30, "b": 1 / 30, "c": 14 / 15})
    assert weights.tolist() == pytest.approx([1 / 29, 0, 28 / 29])


def test_those_that_fare_well_end_at_exactly_zero() -> None:
    weights, state = weigh(afl(gamma=1), report([1, 1], start_loss=[0.0, 3.0]))
    assert weights.tolist() == [0.0, 1.0] and state == {"a": 0.0, "b": 1.0}


def test_without_a_step_all_count_alike() -> None:
    assert weigh(afl(gamma=0), report([90, 10], start_loss=[0.1, 9.0]))[0].tolist() == [0.5, 0.5]


def test_where_nobody_that_enters_counts_size_decides() -> None:
    state = {"a": 0.0, "b": 0.0, "c": 1.0}
    only = report([30, 10, 5], participated=[True, True, False], start_loss=[0.0, 0.0, math.nan])
    weights, after = weigh(afl(), only, state)
    assert weights.tolist() == [0.75, 0.25, 0.0]
    assert after == state
    nobody = report([30, 10, 5], participated=[False] * 3, start_loss=[math.nan] * 3)
    assert weigh(afl(), nobody, state)[0].tolist() == pytest.approx([30 / 45, 10 / 45, 5 / 45])


def test_clients_that_are_unknown_to_a_round_keep_their_part() -> None:
    _, state = weigh(afl(gamma=0.5), report([1, 1, 1], start_loss=[0.2, 0.4, 1.2]))
    _, state = weigh(afl(gamma=0), report([1, 1], client_ids=["a", "d"], start_loss=[1.0, 1.0]), state)
    # d comes in at 1/4, and all four lose what is too much.
    assert state == pytest.approx({"a": 2 / 15 - 1 / 16, "b": 7 / 30 - 1 / 16, "c": 19 / 30 - 1 / 16, "d": 3 / 16})


def test_the_state_given_is_left_alone() -> None:
    _, state = weigh(afl(), report([1, 1], start_loss=[1.0, 2.0]))
    before = dict(state)
    weigh(afl(), report([1, 1], start_loss=[2.0, 1.0]), state)
    assert state == before


def test_the_worst_loss_of_a_run_is_lower_than_with_size_weights() -> None:
    """The small client alone has its class, so that size weights leave it behind."""
    federation, worst = simulated(label_skewed()), {}
    for rule in (afl(), size()):
        (result,) = run_rounds(federation, rule, 12)
        request = Algorithm().request("trial-0", 12, result.model, required_metrics=frozenset({"start_loss"}))
        worst[rule.name] = float(federation.train([request])[0].metric("start_loss").max())
    assert worst["afl"] < 0.8 * worst["size"]


def test_metrics_and_names() -> None:
    assert afl().required_metrics == {"start_loss"}
    assert [afl().name, afl(0.5).name] == ["afl", "afl(gamma=0.5)"]


@pytest.mark.parametrize("gamma", [-0.1, math.nan, math.inf])
def test_bad_settings_are_refused(gamma: float) -> None:
    with pytest.raises(InputError, match="afl needs a finite gamma"):
        afl(gamma)

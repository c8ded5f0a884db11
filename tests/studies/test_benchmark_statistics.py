"""The statistics of a benchmark, worked by hand."""

import math

import pytest

from fedunfold.studies.benchmark.figures import cliques, critical_difference_diagram
from fedunfold.studies.benchmark.runs import fairness
from fedunfold.studies.benchmark.statistics import (
    area,
    critical_difference,
    friedman,
    holm,
    interval,
    mean_ranks,
    paired_p,
    ranks,
    rounds_to,
)


def test_equal_scores_share_the_mean_of_their_ranks() -> None:
    assert ranks({"a": 90.0, "b": 80.0, "c": 90.0, "d": 70.0}) == {"a": 1.5, "b": 3.0, "c": 1.5, "d": 4.0}
    assert ranks({"a": 5.0, "b": 5.0, "c": 5.0}) == {"a": 2.0, "b": 2.0, "c": 2.0}
    # Ranks (1.5, 1.5, 3), (3, 1, 2) and (1, 2, 3).
    found = mean_ranks([{"a": 9, "b": 9, "c": 1}, {"a": 1, "b": 3, "c": 2}, {"a": 3, "b": 2, "c": 1}])
    assert found == {"a": 5.5 / 3, "b": 4.5 / 3, "c": 8 / 3}


def test_friedman_without_ties() -> None:
    """Ranks (1, 2, 3) three times and (1, 3, 2): R = (1, 2.25, 2.75), χ² = 12·4/12 · (1 + 5.0625 + 7.5625 − 12)."""
    scores = [{"a": 3, "b": 2, "c": 1}] * 2 + [{"a": 3, "b": 1, "c": 2}, {"a": 3, "b": 2, "c": 1}]
    found = friedman([{name: float(score) for name, score in own.items()} for own in scores])
    assert found is not None
    assert found[0] == pytest.approx(4 * 1.625)
    assert found[1] == pytest.approx(math.exp(-6.5 / 2))  # χ² with two degrees of freedom


def test_friedman_needs_something_to_compare() -> None:
    assert friedman([{"a": 1.0, "b": 2.0}] * 5) is None
    assert friedman([{"a": 1.0, "b": 2.0, "c": 3.0}]) is None
    assert friedman([{"a": 1.0, "b": 1.0, "c": 1.0}] * 3) == (0.0, 1.0)


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)])
def test_the_critical_difference_has_the_published_quantiles(methods: int, q: float) -> None:
    """Demšar 2006, table 5 (a)."""
    assert critical_difference(methods, 12) == pytest.approx(q * math.sqrt(methods * (methods + 1) / 72), rel=4e-4)


def test_holm_by_hand() -> None:
    """In order 0.005·4, 0.01·3, 0.03·2, 0.04·1; the last is raised to the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_paired_test_by_hand() -> None:
    """d = (1, 2, 4, 5): t = 3 / (√(10/3)/2) = 3.2863 with three degrees of freedom."""
    t = 3 / (math.sqrt(10 / 3) / 2)
    # The t distribution's tail for three degrees of freedom in closed form.
    x = t / math.sqrt(3)
    tail = 0.5 - (math.atan(x) + x / (1 + x * x)) / math.pi
    assert paired_p([1.0, 2.0, 4.0, 5.0]) == pytest.approx(2 * tail, rel=1e-9)
    assert paired_p([-1.0, -2.0, -4.0, -5.0]) == pytest.approx(2 * tail, rel=1e-9)
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert paired_p([0.5, 0.5, 0.5]) == 0.0
    assert paired_p([7.0, 7.0]) == 1.0, "two trials prove nothing"


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 4.0, 5.0])  # mean 3, sd √(10/3), t₃ = 3.182446
    assert found.mean == 3.0
    assert found.low == pytest.approx(3 - 3.182446 * (10 / 3) ** 0.5 / 2, abs=1e-5)
    assert found.high - found.mean == pytest.approx(found.mean - found.low)
    assert interval([2.0]).text() == "+2.00" and interval([2.0]).as_json() == [2.0, None, None]


def test_rounds_to_a_score_and_the_area_under_the_curve() -> None:
    curve = [40.0, 60.0, 50.0, 70.0]
    assert area(curve) == 55.0
    assert rounds_to(curve, 60.0) == 2
    assert rounds_to(curve, 65.0) == 4
    assert rounds_to(curve, 70.5) is None
    assert rounds_to([5.0, 3.0, 4.0], 3.5, greater_is_better=False) == 2
    assert rounds_to([], 1.0) is None


def test_fairness_of_many_clients() -> None:
    """Of twenty-one clients the worst tenth are three."""
    found = fairness([float(score) for score in range(80, 101)])
    assert found == {"mean": 90.0, "sd": round(math.sqrt((21**2 - 1) / 12), 6), "worst": 81.0}
    assert fairness([2.0, 4.0], greater_is_better=False)["worst"] == 4.0
    assert fairness([]) == {}


def test_bars_join_what_does_not_differ() -> None:
    apart = {"a": 1.0, "b": 2.0, "c": 3.5, "d": 4.0}
    assert cliques(apart, 0.4) == []
    assert cliques(apart, 1.5) == [(1.0, 2.0), (2.0, 3.5), (3.5, 4.0)]
    assert cliques(apart, 5.0) == [(1.0, 4.0)]
    assert cliques({"a": 1.5, "b": 1.5}, 1.0) == []


def test_the_diagram_names_every_method() -> None:
    ranking = {"mean_ranks": {"a": 1.2, "b": 2.8, "c": 2.0}, "critical_difference": 1.0}
    (axes,) = critical_difference_diagram(ranking, "ranks").axes
    shown = [text.get_text().strip() for text in axes.texts]
    assert {"a  1.20", "c  2.00", "2.80  b", "critical difference 1.00"} <= set(shown)

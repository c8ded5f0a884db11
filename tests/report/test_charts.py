"""Charts hold what they say they show."""

import math

import numpy as np
import pytest

from fedunfold.core.task import PrimaryMetric
from fedunfold.report import charts
from tests.support.run_records import federation, group, learned, method, run


def test_accuracy_shows_mean_and_spread() -> None:
    chart = charts.scores(group(method("fedavg", [[50, 60], [70, 80]]), method("one", [[1, 2]])))
    band, mean, one = chart["data"]
    assert mean["y"] == [60, 70]
    assert band["y"] == pytest.approx([60 + 200**0.5, 70 + 200**0.5, 70 - 200**0.5, 60 - 200**0.5], rel=1e-5)
    assert (one["name"], one["y"]) == ("one", [1, 2])


def test_gains_and_losses_are_joined_by_lines_of_their_own() -> None:
    before, after = np.array([50.0, 60.0, 70.0, np.nan]), np.array([80.0, 10.0, 70.0, np.nan])
    gains, losses, rings, dots = charts.before_and_after("abcd", before, after, ("old", "new"), x="class")["data"]
    assert (gains["x"], gains["y"]) == (["a", "a", None], [50, 80, None])
    assert (losses["x"], losses["y"]) == (["b", "b", None], [60, 10, None])
    assert (rings["name"], rings["y"]) == ("old", [50, 60, 70, None])
    assert (dots["name"], dots["y"]) == ("new", [80, 10, 70, None])


def test_many_clients_stand_in_the_order_of_the_first_method() -> None:
    names = [f"site-{k}" for k in range(50)]
    before = np.arange(50.0)[::-1]
    chart = charts.before_and_after(names, before, before + 1, ("old", "new"), x="client")
    assert chart["layout"]["xaxis"]["categoryarray"] == names[::-1]
    assert chart["data"][-1]["y"] == [k + 1 for k in range(50)]


def test_labels_that_nobody_holds_are_empty() -> None:
    (trace,) = charts.labels_held(federation(), ("north", "south"), ("0", "<b>", "2"))["data"]
    assert trace["z"] == [[6, 2, None], [None, 2, 10]]
    assert trace["y"] == ["north", "south"]
    assert trace["x"] == ["0", "&lt;b&gt;", "2"]


def test_the_outer_loss_of_all_that_was_learned() -> None:
    chart = charts.outer_loss(run(weights={"a": learned(losses=(4, 3)), "b": learned(losses=(2, 1))}))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in chart["data"]] == [
        ("a", [1, 2], [4, 3]),
        ("b", [1, 2], [2, 1]),
    ]


def test_the_axis_shows_where_methods_differ_late() -> None:
    late = [[0.0, 0.0, *map(float, range(81, 90))]]  # 11 rounds, of which the first two are left out
    low, high = charts.scores(group(method("fedavg", late)))["layout"]["yaxis"]["range"]
    # The 5th percentile of 81 … 89 is 81.4, and 8 % of 7.6 are left at both ends.
    assert (low, high) == pytest.approx((81.4 - 0.608, 89 + 0.608))
    same = charts.scores(group(method("fedavg", [[50.0]])))
    assert "range" not in same["layout"]["yaxis"]
    error = PrimaryMetric("rmse", greater_is_better=False, percentages=frozenset())
    low, high = charts.scores(group(method("fedavg", late), primary=error))["layout"]["yaxis"]["range"]
    assert (low, high) == pytest.approx((81 - 0.608, 88.6 + 0.608))


def test_the_axis_of_scores_leaves_out_what_trains_nothing() -> None:
    trained, nothing = method("fedavg", [[97.0, 98.0]]), method("majority", [[60.0, 60.0]], reference=True)
    low, high = charts.scores(group(trained, nothing))["layout"]["yaxis"]["range"]
    assert 96 < low < 97 and 98 < high < 99


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ([99.0, 97.0], [98.0, 97.5], (89.2, 100.8)),  # ten points below 100, and 0.8 more on either side
        ([20.0, 40.0], [70.0, 30.0], (16.0, 74.0)),  # 50 points, and 4 more
        ([0.0, 1.0], [2.0, 1.0], (-0.8, 10.8)),
        ([50.0, 51.0], [math.nan, 52.0], (45.2, 56.8)),
    ],
)
def test_the_axis_of_percentages_is_where_they_are(
    before: list[float], after: list[float], ends: tuple[float, float]
) -> None:
    chart = charts.before_and_after(["a", "b"], np.array(before), np.array(after), ("x", "y"), x="client")
    assert chart["layout"]["yaxis"]["range"] == pytest.approx(ends)

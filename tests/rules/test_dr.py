import math
from typing import Any

import pytest

from fedunfold.core.errors import InputError
from fedunfold.rules import dr
from tests.support.reports import report, weigh

NAN = math.nan


@pytest.mark.parametrize(
    ("q", "weights"),
    [
        (0, [0.4, 0.6]),  # 1/4·2 : 3/4·1
        (1, [4 / 7, 3 / 7]),  # 1/4·4 : 3/4·1
        (2, [8 / 11, 3 / 11]),  # 1/4·8 : 3/4·1
    ],
)
def test_worked_case(q: float, weights: list[float]) -> None:
    assert weigh(dr(q), report([10, 30], loss=[2.0, 1.0]))[0].tolist() == pytest.approx(weights, rel=1e-12)


def test_the_loss_at_the_start_is_another_metric() -> None:
    mine = dr(loss="start")
    assert mine.required_metrics == {"start_loss"}
    assert dr().required_metrics == {"loss"}
    weights, _ = weigh(mine, report([10, 30], loss=[9.0, 9.0], start_loss=[2.0, 1.0]), None)
    assert weights.tolist() == pytest.approx([4 / 7, 3 / 7])


def test_a_silent_client_counts_with_its_last_loss() -> None:
    _, state = weigh(dr(), report([10, 30], loss=[2.0, 1.0]), None)
    weights, state = weigh(dr(), report([10, 30], round=1, loss=[NAN, 2.0]), state)
    assert weights.tolist() == pytest.approx([1 / 4, 3 / 4])  # losses 2 and 2
    weights, _ = weigh(dr(), report([10, 30], round=2, loss=[1.0, NAN]), state)
    assert weights.tolist() == pytest.approx([1 / 13, 12 / 13])  # losses 1 and 2: 1/4 : 3


def test_a_client_that_never_reported_counts_with_the_mean() -> None:
    # Losses 1, 3 and, for c, 2: 1/4·1 : 1/4·9 : 1/2·4.
    weights, _ = weigh(dr(), report([1, 1, 2], loss=[1.0, 3.0, NAN]), None)
    assert weights.tolist() == pytest.approx([1 / 18, 9 / 18, 8 / 18])


@pytest.mark.parametrize("loss", [[NAN, NAN], [0.0, 0.0], [0.0, NAN]])
def test_size_weights_where_the_losses_say_nothing(loss: list[float]) -> None:
    assert weigh(dr(), report([1, 3], loss=loss))[0].tolist() == pytest.approx([0.25, 0.75])


def test_a_loss_of_zero_gives_no_weight() -> None:
    assert weigh(dr(), report([1, 3], loss=[0.5, 0.0]))[0].tolist() == [1.0, 0.0]


def test_huge_powers_stay_finite() -> None:
    weights, _ = weigh(dr(q=5000), report([1, 3], loss=[1000.0, 1000.0]), None)
    assert weights.tolist() == pytest.approx([0.25, 0.75])
    weights, _ = weigh(dr(q=5000), report([1, 3], loss=[1e-30, 1e-29]), None)
    assert weights.tolist() == pytest.approx([0.0, 1.0])


def test_the_state_given_is_left_alone() -> None:
    _, state = weigh(dr(), report([1, 1], loss=[2.0, 1.0]), None)
    before = dict(state)
    weigh(dr(), report([1, 1], loss=[5.0, 5.0]), state)
    assert state == before


def test_a_loss_that_left_the_finite_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="'dr' in round 6 gives 'a' the weight nan"):
        weigh(dr(), report([1, 1], round=6, loss=[math.inf, 1.0]), None)


def test_names_tell_settings_apart() -> None:
    assert [dr().name, dr(2).name, dr(loss="start").name] == [
        "dr",
        "dr(q=2, loss=path)",
        "dr(q=1, loss=start)",
    ]


@pytest.mark.parametrize("settings", [{"q": -0.1}, {"q": NAN}, {"q": math.inf}, {"loss": "end"}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="dr "):
        dr(**settings)

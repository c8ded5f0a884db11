import math

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.rules import fedadp
from tests.support.reports import report, weigh

# Sizes 3:1 and gradients (1, 0), (0, 1) make g = (3/4, 1/4): the angles are arctan 1/3 and arctan 3.
NEAR, FAR = 0.3217505544, 1.2490457724
ACROSS = [[1.0, 0.0], [0.0, 1.0]]
ALONG = [[1.0, 0.0], [5.0, 0.0]]


def test_worked_case() -> None:
    # β = 1: h(NEAR) = 1 − exp(−exp(0.678249)) = 0.860602, h(FAR) = 1 − exp(−exp(−0.249046)) = 0.541385;
    # 3·e^0.860602 : e^0.541385 = 7.093754 : 1.718385.
    weights, state = weigh(fedadp(beta=1), report([3, 1], gradients=ACROSS), None)
    assert weights.tolist() == pytest.approx([0.804998, 0.195002], abs=1e-6)
    assert state == {"a": (1, pytest.approx(NEAR)), "b": (1, pytest.approx(FAR))}


def test_worked_case_with_the_published_beta() -> None:
    # β = 7: h(NEAR) = 7.0000, h(FAR) = 7 (1 − exp(−0.174939)) = 1.123440; 3289.90 : 3.07541.
    weights, _ = weigh(fedadp(), report([3, 1], gradients=ACROSS), None)
    assert weights.tolist() == pytest.approx([0.999066, 0.000934], abs=1e-6)


def test_the_mean_runs_over_the_rounds_a_client_participated_in() -> None:
    mine = fedadp(beta=1)
    _, state = weigh(mine, report([3, 1], gradients=ACROSS), None)
    weights, state = weigh(mine, report([3, 1], round=1, participated=[True, False], gradients=[[2.0, 0.0]]), state)
    assert weights.tolist() == [1.0, 0.0]
    weights, state = weigh(mine, report([3, 1], round=2, gradients=ALONG), state)
    assert state["a"] == (3, pytest.approx(NEAR / 3))
    assert state["b"] == (2, pytest.approx(FAR / 2))
    # h(0.107250) = 0.912999, h(0.624523) = 0.766760: 3·2.491784 : 2.152779.
    assert weights.tolist() == pytest.approx([0.776407, 0.223593], abs=1e-6)


def test_opposed_gradients() -> None:
    # g = (1/2, 0): a at angle 0, b at π. β = 1: h(0) = 0.934012, h(π) = 0.110831: 3·2.544698 : 1.117206.
    weights, state = weigh(fedadp(beta=1), report([3, 1], gradients=[[1.0, 0.0], [-1.0, 0.0]]), None)
    assert state["b"][1] == pytest.approx(math.pi)
    assert weights.tolist() == pytest.approx([0.872338, 0.127662], abs=1e-6)


def test_a_zero_gradient_stands_at_a_right_angle() -> None:
    _, state = weigh(fedadp(), report([1, 1], gradients=[[1.0, 0.0], [0.0, 0.0]]), None)
    assert state == {"a": (1, 0.0), "b": (1, pytest.approx(math.pi / 2))}


def test_gradients_that_cancel_all_stand_at_a_right_angle() -> None:
    # 1/3·2 − 2/3·1 is 0 but for rounding.
    weights, state = weigh(fedadp(), report([1, 2], gradients=[[2.0, 0.2], [-1.0, -0.1]]), None)
    assert state == {"a": (1, pytest.approx(math.pi / 2)), "b": (1, pytest.approx(math.pi / 2))}
    assert weights.tolist() == pytest.approx([1 / 3, 2 / 3])


def test_cosines_beyond_one_by_rounding_are_angle_zero() -> None:
    gradient = torch.full((1, 7), 0.1).repeat(3, 1)
    _, state = weigh(fedadp(), report([1, 1, 1], gradients=gradient), None)
    assert all(angle == pytest.approx(0, abs=1e-3) for _, angle in state.values())


def test_small_gradients_keep_their_angle_in_single_precision() -> None:
    _, state = weigh(fedadp(), report([3, 1], gradients=torch.tensor(ACROSS) * 1e-18), None)
    assert state["b"][1] == pytest.approx(FAR, rel=1e-5)


def test_nobody_participates() -> None:
    empty = report([3, 1], participated=[False, False], gradients=torch.empty(0, 2))
    weights, state = weigh(fedadp(), empty, {"a": (1, 0.5)})
    assert weights.tolist() == [0.75, 0.25]
    assert state == {"a": (1, 0.5)}


def test_a_large_beta_stays_finite() -> None:
    weights, _ = weigh(fedadp(beta=1e4), report([3, 1], gradients=ACROSS), None)
    assert weights.tolist() == [1.0, 0.0]


def test_gradients_that_left_the_finite_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="'fedadp' in round 0"):
        weigh(fedadp(), report([1, 1], gradients=[[math.nan, 0.0], [1.0, 0.0]]), None)


def test_the_state_given_is_left_alone() -> None:
    _, state = weigh(fedadp(), report([3, 1], gradients=ACROSS), None)
    before = dict(state)
    weigh(fedadp(), report([3, 1], gradients=ALONG), state)
    assert state == before


def test_metrics_and_names() -> None:
    assert fedadp().required_metrics == {"gradients"}
    assert [fedadp().name, fedadp(beta=5).name] == ["fedadp", "fedadp(beta=5)"]


@pytest.mark.parametrize("beta", [0, -1, math.nan, math.inf])
def test_bad_settings_are_refused(beta: float) -> None:
    with pytest.raises(InputError, match="fedadp needs"):
        fedadp(beta)

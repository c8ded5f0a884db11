import pytest

from fedunfold.rules import size
from tests.support.reports import report, weigh


def test_shares_of_the_samples() -> None:
    weights, state = weigh(size(), report([10, 20, 50]), None)
    assert weights.tolist() == [0.125, 0.25, 0.625]
    assert state is None


def test_absent_clients_keep_their_share() -> None:
    weights, _ = weigh(size(), report([1, 3], participated=[True, False]), None)
    assert weights.tolist() == [0.25, 0.75]


def test_shares_have_double_precision_though_sizes_are_integers() -> None:
    assert weigh(size(), report([1, 2]))[0].tolist() == pytest.approx([1 / 3, 2 / 3], rel=1e-15)

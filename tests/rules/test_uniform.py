from fedunfold.rules import uniform
from tests.support.reports import report, weigh


def test_all_clients_count_alike() -> None:
    weights, state = weigh(uniform(), report([10, 20, 50], participated=[True, False, True]), None)
    assert weights.tolist() == [1 / 3, 1 / 3, 1 / 3]
    assert state is None

from fedunfold.rules import uniform
from tests.support.reports import report


def test_all_clients_count_alike() -> None:
    weights, state = uniform()(report([10, 20, 50], present=[True, False, True]), None)
    assert weights.tolist() == [1 / 3, 1 / 3, 1 / 3]
    assert state is None

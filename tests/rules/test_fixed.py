from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.rules import fixed
from tests.support.reports import report, weigh

ROWS = [[0.5, 0.5], [1.0, 0.0]]


@pytest.mark.parametrize("matrix", [ROWS, np.array(ROWS), np.array(ROWS, dtype=np.float32), torch.tensor(ROWS)])
def test_one_row_a_round(matrix: Any) -> None:
    mine = fixed(matrix)
    assert weigh(mine, report([1, 9]))[0].tolist() == [0.5, 0.5]
    assert weigh(mine, report([1, 9], round=1))[0].tolist() == [1.0, 0.0]


def test_the_matrix_is_copied() -> None:
    matrix = np.array(ROWS)
    mine = fixed(matrix, name="learned elsewhere")
    matrix[0] = 7
    weights, _ = weigh(mine, report([1, 1]), None)
    assert weights.tolist() == [0.5, 0.5]
    weights[0] = 7
    assert weigh(mine, report([1, 1]))[0].tolist() == [0.5, 0.5]
    assert mine.name == "learned elsewhere"


def test_single_precision_rows_are_near_enough() -> None:
    thirds = torch.full((1, 3), 1 / 3)
    assert weigh(fixed(thirds), report([1, 1, 1]))[0].tolist() == thirds[0].double().tolist()


def test_a_round_beyond_the_last_row_is_refused() -> None:
    with pytest.raises(InputError, match=r"have 2 rows and none for round 2 .* run at most 2 rounds"):
        weigh(fixed(ROWS), report([1, 1], round=2), None)


def test_another_number_of_clients_is_refused() -> None:
    with pytest.raises(InputError, match="have 2 columns, but the federation has 3 clients"):
        weigh(fixed(ROWS), report([1, 1, 1]), None)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.6]], "row 1 of the weights 'fixed' gives weights that sum to 1.1"),
        ([[1.5, -0.5]], "row 0 of the weights 'fixed' gives 'client 1' the weight -0.5"),
        ([[float("nan"), 1.0]], "gives 'client 0' the weight nan"),
        ([0.5, 0.5], r"need the shape \[rounds, clients\], not \[2\]"),
        (np.zeros((0, 2)), r"not \[0, 2\]"),
        ([[0.5, 0.5], [1.0]], "not a matrix of numbers"),
        ([["much", "little"]], "not a matrix of numbers"),
    ],
)
def test_what_is_no_matrix_of_weights_is_refused(matrix: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fixed(matrix)


def test_columns_go_by_client_id_in_whatever_order_clients_come() -> None:
    rule = fixed([[0.5, 0.3, 0.2]], client_ids=["a", "b", "c"])
    assert rule.client_ids == ("a", "b", "c")
    assert weigh(rule, report([1, 1, 1], client_ids=("c", "a", "b")))[0].tolist() == [0.2, 0.5, 0.3]
    with pytest.raises(InputError, match="no column for client 'd'"):
        rule(report([1, 1, 1], client_ids=("c", "a", "d")), None)
    with pytest.raises(InputError, match="3 columns and 2 names"):
        fixed([[0.5, 0.3, 0.2]], client_ids=["a", "b", "a"])

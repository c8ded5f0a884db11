"""FederatedData: what it joins, what it refuses and what it keeps."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.data import FederatedData

TEST = (np.zeros((2, 3)), np.array([0, 1]))


def two_clients() -> FederatedData:
    x = np.arange(90, dtype=np.float32).reshape(30, 3)
    y = np.arange(30) % 3
    return FederatedData.from_clients({"a": (x[:10], y[:10]), "b": (x[10:], y[10:])}, TEST)


def test_rows_lie_one_client_after_the_other() -> None:
    data = two_clients()
    assert data.keys == ("a", "b")
    assert data.offsets == (0, 10, 30)
    assert data.sizes == (10, 20)
    assert data.classes == 3
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    x, y = data.client(1)
    assert torch.equal(x, data.x[10:]) and torch.equal(y, data.y[10:])


def test_label_counts_are_per_client_and_class() -> None:
    counts = two_clients().label_counts
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[4, 3, 3], [6, 7, 7]]


def test_uint8_is_scaled_and_tensors_are_accepted() -> None:
    image = torch.full((2, 4, 4), 255, dtype=torch.uint8)
    data = FederatedData.from_clients({"a": (image, torch.tensor([0, 1]))}, (image, [1, 0]), classes=5)
    assert data.x.shape == (2, 4, 4)
    assert data.x.max() == 1
    assert data.label_counts.shape == (1, 5)


def test_read_only_arrays_are_copied() -> None:
    x, y = np.ones((2, 3), dtype=np.float32), np.array([0, 1])
    x.setflags(write=False)
    y.setflags(write=False)
    data = FederatedData.from_clients({"a": (x, y)}, (x, y))
    data.x_test[0, 0] = 5
    assert x[0, 0] == 1


def test_restricted_keeps_a_seeded_share_in_order() -> None:
    data = two_clients()
    part = data.restricted(0.1, seed=3)
    assert part.sizes == (1, 2)  # 0.1 · 10 and 0.1 · 20, not one more for floating point
    third = data.restricted(1 / 3, seed=3)
    assert third.sizes == (4, 7)
    assert torch.equal(third.x, data.restricted(1 / 3, seed=3).x)
    assert not torch.equal(third.x, data.restricted(1 / 3, seed=4).x)
    for k in range(2):
        first_column = third.client(k)[0][:, 0].tolist()
        assert first_column == sorted(first_column)
        assert set(first_column) <= set(data.client(k)[0][:, 0].tolist())
    assert data.restricted(1, seed=0) is data
    assert third.label_counts.sum() == 11


def test_restricted_draws_by_key_not_by_position() -> None:
    data = two_clients()
    swapped = FederatedData.from_clients({"b": data.client(1), "a": data.client(0)}, TEST)
    assert torch.equal(data.restricted(0.5, 1).client(1)[0], swapped.restricted(0.5, 1).client(0)[0])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_restricted_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(InputError, match=r"\(0, 1\]"):
        two_clients().restricted(fraction, seed=0)


@given(fraction=st.floats(0.11, 0.9), seed=st.integers(0, 50))
def test_held_out_rows_are_the_test_set_and_nowhere_else(fraction: float, seed: int) -> None:
    data = two_clients()
    split = data.held_out(fraction, seed)
    kept = [math.ceil(round((1 - fraction) * size, 9)) for size in data.sizes]
    assert list(split.sizes) == kept
    together = torch.cat([split.x, split.x_test])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, data.x.tolist()))
    assert torch.equal(split.x_test, data.held_out(fraction, seed).x_test)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_held_out_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(InputError, match=r"\(0, 1\)"):
        two_clients().held_out(fraction, seed=0)


def test_held_out_needs_something_to_hold_out() -> None:
    with pytest.raises(InputError, match="leaves nothing to test on"):
        two_clients().held_out(0.01, seed=0)


GOOD = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("x", "y", "named"),
    [
        (np.zeros((0, 3)), np.zeros(0, dtype=int), "x of client bad is empty"),
        (np.zeros((2, 4)), [0, 1], "x of client bad has rows of shape"),
        (
            np.array([[0, 0, 0], [0, np.nan, 0]]),
            [0, 1],
            "x of client bad has a NaN or infinite value in row 1",
        ),
        (
            np.array([[1e300, 0, 0], [0, 0, 0]]),
            [0, 1],
            "x of client bad has a NaN or infinite value in row 0",
        ),
        (np.full((2, 3), "a"), [0, 1], "x of client bad has type"),
        (np.zeros((2, 3), dtype=complex), [0, 1], "x of client bad has type"),
        (np.zeros((2, 3), dtype=np.uint8), [0, 1], "x of client bad has type uint8"),
        (np.zeros(2), [0, 1], "x of client bad has shape"),
        ([[1, 2, 3], [1]], [0, 1], "x of client bad is not a plain numeric array"),
        (GOOD, [0, -1], "y of client bad has the label -1"),
        (GOOD, [0, 2], "y of client bad has the label 2 but there are 2 classes"),
        (GOOD, [0.0, 1.0], "y of client bad has type float64"),
        (GOOD, [0, 1, 1], "y of client bad has shape"),
    ],
)
def test_bad_arrays_are_named_in_one_line(x: Any, y: Any, named: str) -> None:
    with pytest.raises(InputError) as caught:
        FederatedData.from_clients({"good": (GOOD, np.array([0, 1])), "bad": (x, y)}, TEST, classes=2)
    assert str(caught.value).startswith(named)
    assert "\n" not in str(caught.value)


def test_no_clients_one_class_and_an_empty_test_set_are_refused() -> None:
    pair = (GOOD, np.array([0, 0]))
    with pytest.raises(InputError, match="no clients"):
        FederatedData.from_clients({}, TEST)
    with pytest.raises(InputError, match=r"1 class\(es\)"):
        FederatedData.from_clients({"a": pair}, pair)
    with pytest.raises(InputError, match="x of the test set is empty"):
        FederatedData.from_clients({"a": pair}, (np.zeros((0, 3)), np.zeros(0, dtype=int)))
    with pytest.raises(InputError, match="too many classes"):
        FederatedData.from_clients({"a": (GOOD, np.array([0, 10**12]))}, TEST)
    with pytest.raises(InputError, match="client a has 3 arrays"):
        FederatedData.from_clients({"a": (GOOD, [0, 1], [0])}, TEST)  # type: ignore[dict-item]

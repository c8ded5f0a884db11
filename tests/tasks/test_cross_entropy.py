"""Losses and slopes against autograd and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedunfold.tasks.cross_entropy import cross_entropy, softmax_jacobian_product, squared_error


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits [L, B, C] and labels [L, B]."""
    slots, rows, classes = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    count = slots * rows
    values = draw(st.lists(st.floats(-30, 30), min_size=count * classes, max_size=count * classes))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
    logits = torch.tensor(values, dtype=torch.float64).reshape(slots, rows, classes)
    return logits, torch.tensor(labels).reshape(slots, rows)


def slope_of(losses: Tensor, logits: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(losses.sum(), logits)
    return slope


@given(scored())
def test_cross_entropy_and_its_slope(pair: tuple[Tensor, Tensor]) -> None:
    logits, labels = pair
    leaf = logits.clone().requires_grad_()
    expected = functional.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="none")
    losses, slope = cross_entropy(logits, labels)
    torch.testing.assert_close(losses.flatten(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, slope_of(expected, leaf), rtol=1e-12, atol=1e-12)


@given(scored())
def test_squared_error_and_its_slope(pair: tuple[Tensor, Tensor]) -> None:
    logits, labels = pair
    leaf = logits.clone().requires_grad_()
    truth = functional.one_hot(labels, logits.shape[-1]).double()
    expected = functional.mse_loss(leaf.softmax(-1), truth, reduction="none").mean(-1)
    losses, slope = squared_error(logits, labels)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, slope_of(expected, leaf), rtol=1e-12, atol=1e-12)


def test_by_hand() -> None:
    """softmax(ln 3, 0) = (3/4, 1/4)."""
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    losses, slope = cross_entropy(logits, torch.tensor([1]))
    assert losses.item() == pytest.approx(math.log(4))
    assert slope[0].tolist() == pytest.approx([0.75, -0.75])
    losses, slope = squared_error(logits, torch.tensor([1]))
    assert losses.item() == pytest.approx(0.5625)
    assert slope[0].tolist() == pytest.approx([0.75 * 0.25 * 1.5, -0.75 * 0.25 * 1.5])


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4]], dtype=torch.float32)
    for loss in (cross_entropy, squared_error):
        for part in loss(logits, torch.tensor([1])):
            assert part.isfinite().all()


def test_inputs_are_left_alone() -> None:
    logits, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    cross_entropy(logits, labels)
    squared_error(logits, labels)
    assert logits.tolist() == [[1, 2]]
    assert labels.tolist() == [0]


@given(scored(), st.integers(0, 100))
def test_softmax_jacobian_product(pair: tuple[Tensor, Tensor], seed: int) -> None:
    logits, _ = pair
    s = logits.softmax(-1)
    v = torch.randn(s.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    matrix = torch.diag_embed(s) - s.unsqueeze(-1) * s.unsqueeze(-2)
    expected = (matrix @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(softmax_jacobian_product(s, v), expected, rtol=1e-12, atol=1e-12)

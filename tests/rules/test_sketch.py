"""Sketches of updates: their products stand for those of the updates."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.rules import sketch as sketching
from fedunfold.rules.features import read_features
from fedunfold.rules.measurements import Measurements
from fedunfold.rules.sketch import BUCKETS, SAMPLED, sketch
from tests.rules.test_unfolded import round_of

D = 3 * BUCKETS + 7


def correlated(n: int, d: int, cosine: float, seed: int = 0) -> Tensor:
    """Vectors of which each two have about this cosine."""
    drawn = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(rows, d, generator=drawn, dtype=torch.float64) for rows in (1, n))
    return math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own


def cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    products: Tensor = unit @ unit.T
    return products


def by_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketching, "EXACT_PRODUCTS", 0)


def test_it_adds_signed_entries_by_their_remainder() -> None:
    """Two entries that fall into one bucket add up with their signs, and the others stay alone."""
    rows = torch.zeros(1, D, dtype=torch.float64)
    rows[0, 5], rows[0, 5 + BUCKETS], rows[0, 6] = 3.0, 4.0, 2.0
    found = sketch(rows)[0]
    assert found.shape == (BUCKETS,)
    assert abs(float(found[5])) in (1.0, 7.0) and abs(float(found[6])) == 2.0
    assert torch.count_nonzero(found) == 2


@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9])
def test_cosines_are_within_five_standard_errors(cosine: float) -> None:
    rows = correlated(12, D, cosine)
    kept, exact = sketch(rows), cosines(rows)
    norms = rows.norm(dim=1)
    found = kept @ kept.T / norms / norms[:, None]
    error = ((1 + exact.square()) / BUCKETS).sqrt()
    apart = ~torch.eye(12, dtype=torch.bool)
    assert float(((found - exact).abs() / error)[apart].max()) < 5
    assert float(((found - exact) / error)[apart].square().mean().sqrt()) == pytest.approx(1, abs=0.5)


def test_products_are_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 200 draws of the signs the mean error is within four of its standard errors, 1/√(200 q)."""
    rows, found = correlated(2, D, 0.4), []
    exact = float(rows[0] @ rows[1])
    for seed in range(200):
        monkeypatch.setattr(sketching, "_SEED", seed)
        sketching._sample.cache_clear()
        first, second = sketch(rows)
        found.append(float(first @ second) - exact)
    sketching._sample.cache_clear()
    scale = float(rows[0].norm() * rows[1].norm())
    assert abs(sum(found) / 200) < 4 * scale * math.sqrt((1 + 0.16) / (200 * BUCKETS))


def test_the_same_every_time_and_a_short_vector_is_kept() -> None:
    rows = correlated(3, 50, 0.2)
    first = sketch(rows)
    sketching._sample.cache_clear()
    assert torch.equal(first, sketch(rows))
    torch.testing.assert_close(first @ first.T, rows @ rows.T)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(5)))
def test_relisted_clients_have_relisted_features(order: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        by_sketches(patched)
        rows, sizes = correlated(5, 300, 0.3), [10, 20, 30, 40, 50]
        found = read_features(report_of(rows, sizes), None, 5)
        other = read_features(report_of(rows[order], [sizes[k] for k in order]), None, 5)
        torch.testing.assert_close(other.of_clients, found.of_clients[order])
        torch.testing.assert_close(other.of_round, found.of_round)


def report_of(rows: Tensor, sizes: list[int]) -> ClientUpdates:
    return round_of(0, rows.tolist(), sizes, [1] * len(sizes))


def test_features_are_about_those_of_exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, and what they alone enter, are exact; cosines are off by 0.016, and what is made of them not by much."""
    report = replace(report_of(correlated(6, D, 0.3), [10, 20, 30, 40, 50, 60]), previous=correlated(1, D, 0.3)[0])
    exact = Measurements(report, {}, None)
    expected = read_features(report, None, None)
    assert exact.sketches is None
    by_sketches(monkeypatch)
    found, measured = read_features(report, None, None), Measurements(report, {}, None)
    np.testing.assert_allclose(measured.norms, exact.norms, rtol=1e-6)
    off = (measured.along - exact.along) / (exact.norms * exact.previous_norm)
    assert 0 < np.abs(off).max() < 0.08
    assert not np.array_equal(measured.products, exact.products)
    assert float((found.of_clients - expected.of_clients).abs().max()) < 0.08
    assert float((found.of_round - expected.of_round).abs().max()) < 0.08


def test_sketches_of_clients_that_sent_nothing_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    by_sketches(monkeypatch)
    rows = correlated(4, 200, 0.3)
    sizes = [10, 20, 30, 40]

    def remembering(t: int, here: list[int], sent: Tensor, memory: Tensor) -> ClientUpdates:
        report = round_of(t, sent.tolist(), sizes, [1] * 4, here)
        return replace(report, remembered=OpenUpdates(torch.arange(4), memory))

    first = read_features(remembering(0, [0, 1, 2, 3], rows, rows), None, None)
    fresh = correlated(2, 200, 0.3, seed=1)
    memory = torch.stack([fresh[0], rows[1], fresh[1], rows[3]])
    made: list[int] = []

    def counting(given: Tensor, layer_sizes: tuple[int, ...]) -> Tensor:
        made.append(len(given))
        return sketch(given, layer_sizes)

    monkeypatch.setattr(sketching, "sketch", counting)
    second = remembering(1, [0, 2], fresh, memory)
    found = read_features(second, first.state, None)
    assert made == [2]
    alone = read_features(second, {**first.state, "sketches": None}, None)
    assert made == [2, 4]
    torch.testing.assert_close(found.of_clients, alone.of_clients)
    torch.testing.assert_close(found.state["sketches"]["products"], alone.state["sketches"]["products"])


def test_of_every_layer_as_large_a_part_is_read_and_small_ones_whole() -> None:
    """Of (6·q, q, 5) entries: a third of a sketch for each of the large ones, scaled by what it stands for."""
    sizes = (6 * BUCKETS, BUCKETS, 5)
    rows = torch.ones(1, sum(sizes), dtype=torch.float64)
    squares = sketch(rows, sizes)[0].square()
    assert len(squares) == 2 * (BUCKETS // 3) + 5
    expected = [6 * BUCKETS / (BUCKETS // 3)] * (BUCKETS // 3) + [BUCKETS / (BUCKETS // 3)] * (BUCKETS // 3) + [1.0] * 5
    assert squares.tolist() == pytest.approx(expected)
    assert float(squares.sum()) == pytest.approx(sum(sizes))


def test_more_of_a_very_large_layer_is_read() -> None:
    size = 2 * SAMPLED * BUCKETS
    sample = sketching._sample((size,), size, torch.float64, torch.device("cpu"))
    assert sample.entries is not None and len(sample.entries) == 2 * BUCKETS
    assert bool((sample.entries.diff() >= 0).all()) and int(sample.entries[-1]) < size


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=4), st.lists(st.integers(0, 36000), max_size=4))
def test_parts_make_the_sketch_of_the_whole(sizes: list[int], cuts: list[int]) -> None:
    d = sum(sizes)
    rows = correlated(2, d, 0.3)
    sample = sketching._sample(tuple(sizes), d, rows.dtype, rows.device)
    found = rows.new_zeros(2, min(len(sample.factors), BUCKETS))
    ends = sorted({0, d, *(cut for cut in cuts if cut < d)})
    for begin, end in pairwise(ends):
        sketching._add_part(found, begin, rows[:, begin:end], sample)
    assert torch.equal(found, sketch(rows, tuple(sizes)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(-6, 6))
def test_products_are_those_of_vectors_as_long_as_the_updates(seed: int, log_scale: float) -> None:
    """No cosine is beyond ±1, no sum of updates has a negative square, and squares are exact."""
    with pytest.MonkeyPatch.context() as patched:
        by_sketches(patched)
        rows = correlated(4, 2 * D, 0.9, seed) * torch.tensor([[1.0], [-1.0], [10.0**log_scale], [0.0]])
        measured = Measurements(report_of(rows, [10, 20, 30, 40]), {}, None)
        norms, products = rows.norm(dim=1).numpy(), measured.products
    np.testing.assert_allclose(measured.norms, norms, rtol=1e-9)
    assert (np.abs(products) <= np.outer(norms, norms) * (1 + 1e-9)).all()
    assert np.linalg.eigvalsh(products).min() >= -1e-9 * products.trace()

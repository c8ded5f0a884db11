"""Partitions: no row twice, none lost where all are used, nobody left empty."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.partitions import (
    DirichletPartition,
    IidPartition,
    Indices,
    IndicesPartition,
    LabelsPartition,
    SharesPartition,
    SizesPartition,
)


def iid(y: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
    return IidPartition().split(y, clients, rng)


def by_sizes(y: Indices, sizes: Any, rng: np.random.Generator) -> list[Indices]:
    return SizesPartition(sizes=sizes).split(y, len(sizes), rng)


def by_labels(y: Indices, labels: Any, sizes: Any, rng: np.random.Generator) -> list[Indices]:
    return LabelsPartition(labels=labels, sizes=sizes).split(y, len(labels), rng)


def by_shares(y: Indices, shares: Any, rng: np.random.Generator) -> list[Indices]:
    return SharesPartition(shares=shares).split(y, len(shares), rng)


def dirichlet(y: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    return DirichletPartition(alpha=alpha).split(y, clients, rng)


def by_indices(y: Indices, indices: Any) -> list[Indices]:
    return IndicesPartition(indices=indices).split(y, len(indices), np.random.default_rng(0))


def labels(n: int, classes: int = 5, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, classes, n)


def check(y: NDArray[np.int64], parts: list[NDArray[np.int64]], rows: int) -> None:
    """Disjoint, nobody empty, `rows` rows in all, each valid and sorted."""
    together = np.concatenate(parts)
    assert min(len(part) for part in parts) >= 1
    assert len(together) == len(np.unique(together)) == rows
    assert together.min() >= 0 and together.max() < len(y)
    assert all((np.diff(part) > 0).all() for part in parts)


seeds = st.integers(0, 2**32)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), share=st.floats(0, 1), seed=seeds)
def test_iid_covers_in_equal_parts(n: int, share: float, seed: int) -> None:
    clients = max(1, int(share * n))
    y = labels(n)
    parts = iid(y, clients, np.random.default_rng(seed))
    check(y, parts, n)
    sizes = [len(part) for part in parts]
    assert len(sizes) == clients and max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10), spare=st.integers(0, 20), seed=seeds)
def test_sizes_are_exact(sizes: list[int], spare: int, seed: int) -> None:
    y = labels(sum(sizes) + spare)
    parts = by_sizes(y, sizes, np.random.default_rng(seed))
    check(y, parts, sum(sizes))
    assert [len(part) for part in parts] == sizes


label_sets = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(sets=label_sets, seed=seeds, data=st.data())
def test_labels_with_sizes_are_equal_per_label(sets: list[list[int]], seed: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(sets), max_size=len(sets)))
    y = np.repeat(np.arange(5), 300)
    parts = by_labels(y, sets, sizes, np.random.default_rng(seed))
    check(y, parts, sum(sizes))
    for part, own, size in zip(parts, sets, sizes, strict=True):
        counts = [int((y[part] == label).sum()) for label in own]
        assert sum(counts) == len(part) == size
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@settings(max_examples=40, deadline=None)
@given(sets=label_sets, seed=seeds)
def test_labels_without_sizes_divide_all_rows_evenly(sets: list[list[int]], seed: int) -> None:
    y = labels(200)
    parts = by_labels(y, sets, None, np.random.default_rng(seed))
    listed = {label for own in sets for label in own}
    check(y, parts, int(np.isin(y, list(listed)).sum()))
    for label in listed:
        counts = [int((y[part] == label).sum()) for part, own in zip(parts, sets, strict=True) if label in own]
        assert max(counts) - min(counts) <= 1
    for part, own in zip(parts, sets, strict=True):
        assert set(y[part].tolist()) <= set(own)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    exponent=st.floats(np.log10(0.0005), 3),
    seed=seeds,
)
def test_dirichlet_covers_and_leaves_nobody_empty(n: int, share: float, exponent: float, seed: int) -> None:
    clients = max(1, int(share * n))
    y = labels(n)
    check(y, dirichlet(y, clients, 10**exponent, np.random.default_rng(seed)), n)


def test_dirichlet_gives_whole_classes_at_tiny_alpha_and_even_shares_at_large() -> None:
    y = np.repeat(np.arange(120), 100)
    tiny = dirichlet(y, 5, 0.0005, np.random.default_rng(0))
    owners = [sum(bool((y[part] == label).any()) for part in tiny) for label in range(120)]
    assert np.mean(owners) < 1.1
    large = dirichlet(y, 5, 1e6, np.random.default_rng(0))
    assert max(abs(len(part) - 2400) for part in large) < 120


def test_dirichlet_shares_have_the_right_variance() -> None:
    """Var p_k = (1/K)(1 − 1/K)/(Kα + 1), here with K = 4, α = 0.5."""
    y = np.repeat(np.arange(3000), 100)
    first = dirichlet(y, 4, 0.5, np.random.default_rng(1))[0]
    shares = np.bincount(y[first], minlength=3000) / 100
    assert shares.mean() == pytest.approx(0.25, abs=0.02)
    assert shares.var() == pytest.approx(0.25 * 0.75 / 3, rel=0.08)


@pytest.mark.parametrize("alpha", [0.0005, 1e-9, 0.1, 1e9])
def test_dirichlet_with_a_thousand_clients(alpha: float) -> None:
    y = labels(1297, 10)
    parts = dirichlet(y, 1000, alpha, np.random.default_rng(0))
    assert len(parts) == 1000
    check(y, parts, 1297)


def test_indices_are_taken_as_listed() -> None:
    y = labels(10)
    parts = by_indices(y, [[3, 1], [9]])
    assert [part.tolist() for part in parts] == [[1, 3], [9]]


def test_the_generator_decides() -> None:
    y = labels(100)

    def draws(seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        parts = iid(y, 3, rng) + by_sizes(y, [5, 6], rng)
        parts += by_labels(y, [[0], [1, 0]], None, rng) + dirichlet(y, 4, 0.3, rng)
        return [part.tolist() for part in parts]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda y, r: iid(y, 11, r), "10 samples cannot give each of 11 clients one"),
        (lambda y, r: iid(y, 0, r), "each of 0 clients"),
        (lambda y, r: dirichlet(y, 11, 1.0, r), "each of 11 clients"),
        (lambda y, r: dirichlet(y, 2, 0.0, r), "alpha: must be at least 1e-09"),
        (lambda y, r: dirichlet(y, 2, float("nan"), r), "alpha: must be a finite number"),
        (lambda y, r: by_sizes(y, [6, 5], r), "add up to 11 but there are 10"),
        (lambda y, r: by_sizes(y, [6, 0], r), "sizes.1: must be at least 1, got 0"),
        (
            lambda y, r: by_labels(y, [[0], [0]], [3, 3], r),
            "Client 1 needs 3 samples of label 0 but 2",
        ),
        (
            lambda y, r: by_labels(y, [[0], [7]], None, r),
            "Label 7 has 0 samples for 1 clients, [1]",
        ),
        (lambda y, r: by_labels(y, [[0], []], None, r), "Client 1 lists the labels []"),
        (lambda y, r: by_labels(y, [[0, 0]], None, r), "Client 0 lists the labels [0, 0]"),
        (lambda y, r: by_indices(y, [[0], [10]]), "Client 1 lists row 10"),
        (lambda y, r: by_indices(y, [[-1]]), "indices.0.0: must be at least 0, got -1"),
        (lambda y, r: by_indices(y, [[0], []]), "Client 1 lists no row"),
        (
            lambda y, r: by_indices(y, [[0, 1], [1]]),
            "Row 1 is listed more than once, by client(s) [0, 1]",
        ),
        (lambda y, r: by_indices(y, [[2, 2]]), "Row 2 is listed more than once"),
    ],
)
def test_impossible_divisions_are_named_in_one_line(act, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=re.escape(named)) as caught:
        act(np.repeat([0, 1], 5), np.random.default_rng(0))
    assert "\n" not in str(caught.value)


def test_shares_split_a_class_in_proportion() -> None:
    y = np.repeat([0, 1, 2], [12, 10, 5])
    parts = by_shares(y, [[(0, 2), (1, 1)], [(0, 1)], [(1, 999), (0, 0.001)]], np.random.default_rng(0))
    counts = [np.bincount(y[part], minlength=3).tolist() for part in parts]
    assert counts == [[8, 1, 0], [3, 0, 0], [1, 9, 0]]  # nobody listed class 2
    assert len(np.unique(np.concatenate(parts))) == 22


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[(0, 1)], []], "Client 1 lists no class"),
        ([[(0, 1), (0, 2)]], "Client 0 lists class 0 twice"),
        ([[(1, 1)], [(1, 1)], [(1, 1)]], "Class 1 has 2 samples for 3 clients"),
    ],
)
def test_shares_that_cannot_be(shares: list[list[tuple[int, float]]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        by_shares(np.array([0, 0, 1, 1]), shares, np.random.default_rng(0))

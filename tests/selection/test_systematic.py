"""Samples of fixed size in which every client is as likely as it should be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core import rng
from fedunfold.selection.systematic import inclusion_probabilities, systematic_sample

SCORES = st.lists(st.integers(0, 1000) | st.floats(1e-6, 1e9), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([1, 1, 2], 1, [0.25, 0.25, 0.5]),
        ([1, 1, 2], 2, [0.5, 0.5, 1.0]),
        # 3 · 0.8 exceeds 1, then of the two that are left for 1, 1 and 18 2 · 0.9 does, then 1 is left for 1 and 1
        ([1, 1, 18, 80], 3, [0.5, 0.5, 1.0, 1.0]),
        ([1, 1, 18, 80], 4, [1.0] * 4),
        ([0, 0, 0], 2, [2 / 3] * 3),
        ([0, 0, 7], 1, [0, 0, 1]),
        ([0, 0, 7], 2, [0.5, 0.5, 1]),
    ],
)
def test_probabilities(scores: list[float], count: int, expected: list[float]) -> None:
    assert inclusion_probabilities(np.array(scores), count).tolist() == pytest.approx(expected)


@given(SCORES, st.data())
def test_probabilities_sum_to_the_cohort_and_follow_the_scores(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    found = inclusion_probabilities(np.array(scores, dtype=float), count)
    assert math.isclose(found.sum(), count, rel_tol=1e-9)
    assert ((found >= 0) & (found <= 1)).all()
    free = [k for k, p in enumerate(found) if p < 1 and scores[k] > 0]
    for k in free[1:]:
        assert math.isclose(found[k] * scores[free[0]], found[free[0]] * scores[k], rel_tol=1e-9)


@given(SCORES, st.integers(0, 10**6), st.data())
def test_so_many_and_nobody_twice_however_they_are_listed(scores: list[float], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    inclusion = inclusion_probabilities(np.array(scores, dtype=float), count)
    tickets = np.random.default_rng(seed).uniform(size=len(scores))
    chosen = set(systematic_sample(inclusion, tickets).tolist())
    assert len(chosen) == count
    assert all(inclusion[k] > 0 for k in chosen)
    order = data.draw(st.permutations(range(len(scores))))
    relisted = systematic_sample(inclusion[order], tickets[order])
    assert {order[i] for i in relisted.tolist()} == chosen


@pytest.mark.parametrize("count", [1, 2, 4])
def test_frequencies_are_the_probabilities(count: int) -> None:
    """Over 20,000 draws of the package's own tickets; within 4.5 standard deviations of a binomial count."""
    scores, draws = np.array([1.0, 2.0, 3.0, 5.0, 8.0, 30.0]), 20_000
    inclusion, names = inclusion_probabilities(scores, count), list("abcdef")
    counts = np.zeros(6)
    for t in range(draws):
        counts[systematic_sample(inclusion, rng.uniforms(0, "sampling", ("trial-0", t), names))] += 1
    spread = np.sqrt(inclusion * (1 - inclusion) / draws)
    assert (np.abs(counts / draws - inclusion) <= 4.5 * spread + 1e-12).all()


def test_the_order_is_random_too() -> None:
    """Of four clients with π = 1/2 every pair is drawn at times; in a fixed order only every other one would be."""
    tickets = np.random.default_rng(0).uniform(size=(300, 4))
    pairs = {tuple(sorted(systematic_sample(np.full(4, 0.5), row).tolist())) for row in tickets}
    assert len(pairs) == 6

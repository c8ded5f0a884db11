"""Systematic sampling: a cohort of fixed size in which every client is exactly as likely as it should be.

Put the clients in random order on a line, client k taking up a length of π_k with Σ_k π_k = C, and throw a comb with
teeth at u, u + 1, …, u + C − 1 on it, u uniform in [0, 1). No client takes up more than 1, so each is hit by at most
one tooth, with probability π_k, and exactly C are hit. Order and u both come from the tickets: the ranks of independent
uniform numbers are independent of their sum, and the fractional part of the sum is uniform. So the cohort does not
depend on how the clients are listed.

Reference: Madow 1949, On the Theory of Systematic Sampling, II.
"""

import numpy as np


def inclusion_probabilities(scores: np.ndarray, count: int) -> np.ndarray:
    """π_k = min(1, γ q_k) with γ such that Σ_k π_k = C: proportional to the scores, but for those that would exceed 1.

    Clients at 1 are taken out and the rest of C is shared among the others, until nobody exceeds 1. Where fewer than C
    clients have a score above 0, the others share alike what those leave.

    Args:
        scores: q_k ≥ 0, [K].
        count: C, at most K.

    >>> inclusion_probabilities(np.array([10, 30, 60]), count=1).tolist()
    [0.1, 0.3, 0.6]
    >>> inclusion_probabilities(np.array([10, 30, 60]), count=2).tolist()  # 2 · 0.6 is above 1; then 1 is left for two
    [0.25, 0.75, 1.0]
    """
    certain = np.zeros(len(scores), dtype=bool)
    while not certain.all():
        q = np.where(certain, 0.0, scores)
        if not q.any():
            q = np.where(certain, 0.0, 1.0)
        shares = (count - certain.sum()) * (q / q.sum())
        if not (above := shares >= 1).any():
            return np.where(certain, 1.0, shares)
        certain |= above
    return np.ones(len(scores))


def systematic_sample(inclusion: np.ndarray, tickets: np.ndarray) -> np.ndarray:
    """Indices of the sampled clients.

    Args:
        inclusion: π_k, [K]; their sum is C, a whole number.
        tickets: A number for each client, uniform in [0, 1).

    >>> systematic_sample(np.array([0.25, 0.75, 1.0]), np.array([0.6, 0.3, 0.4])).tolist()  # order 1, 2, 0; u = 0.3
    [1, 2]
    """
    order = np.argsort(tickets)
    # To 32 binary places, u + j is exact; what rounding misses at the end of the line must take no tooth away.
    u, ends = np.floor(tickets[order].sum() % 1 * 2**32) / 2**32, np.cumsum(inclusion[order])
    ends[-1] = count = round(ends[-1])
    hit: np.ndarray = order[np.searchsorted(ends, u + np.arange(count), side="right")]
    return hit

"""Orders in which clients meet their rows."""

from functools import lru_cache

import numpy as np

from fedunfold.core import rng
from fedunfold.engines.simulation.backends.cpu.bindings import is_built, shuffle, shuffle_ends

MOST_THREADS = 4
WORTH_THREADS = 100_000
"""Rows: of fewer, threads take as long to begin as to draw them."""


def shuffle_rows(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray, threads: int = 1) -> None:
    """Add to the rows [S, L, B] of epochs what `rng.permutation` draws with their keys [N, 2].

    An epoch [N, 3] is a lane, its first step and its number of rows. Compiled code draws what numpy draws, in half the
    time, and of many rows with as many of the threads as help.
    """
    steps, lanes, width = rows.shape
    lane, first, size = epochs.T
    if not ((lane < lanes) & (first * width + size <= steps * width) & (epochs >= 0).all(1)).all():
        raise ValueError("there are epochs beyond the rows.")
    if keys.shape != (len(epochs), 2):
        raise ValueError(f"there are keys of shape {keys.shape} for {len(epochs)} epochs.")
    if _draws_as_numpy():
        shuffle(rows, keys, epochs, min(MOST_THREADS, threads) if size.sum() >= WORTH_THREADS else 1)
    else:
        _shuffle_by_numpy(rows, keys, epochs)


def last_rows(sizes: np.ndarray, kept: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Of the orders that `rng.permutation` draws with keys [N, 2], of so many rows [N], the last `kept` [N] of
    each, one after the other. Compiled code draws no more than these."""
    if not ((kept >= 0) & (kept <= sizes)).all():
        raise ValueError("more rows are kept than there are.")
    if keys.shape != (len(sizes), 2):
        raise ValueError(f"there are keys of shape {keys.shape} for {len(sizes)} epochs.")
    if not _draws_as_numpy():
        orders = [rng.permutation(size, key) for size, key in zip(sizes.tolist(), keys, strict=True)]
        return np.concatenate([order[len(order) - n :] for order, n in zip(orders, kept.tolist(), strict=True)])
    ends = np.empty(kept.sum(), dtype=np.int32)
    shuffle_ends(ends, keys, np.stack([sizes, kept], 1))
    return ends


def _shuffle_by_numpy(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray) -> None:
    width = rows.shape[2]
    for key, (lane, first, size) in zip(keys, epochs.tolist(), strict=True):
        steps = -(-size // width)
        order = np.zeros(steps * width, dtype=np.int32)
        order[:size] = rng.permutation(size, key)
        rows[first : first + steps, lane] += order.reshape(steps, width)


@lru_cache(maxsize=1)
def _draws_as_numpy() -> bool:
    """Whether compiled code is there, and numpy still draws as it did when that was written."""
    if not is_built():
        return False
    key, size = rng.philox_key(0, "as numpy"), 1000
    rows = np.zeros((1, 1, size), dtype=np.int32)
    shuffle(rows, key[None], np.array([[0, 0, size]]))
    return bool((rows[0, 0] == rng.permutation(size, key)).all())

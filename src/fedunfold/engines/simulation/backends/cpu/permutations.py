"""The orders in which clients visit their rows."""

from functools import lru_cache

import numpy as np

from fedunfold.core import rng
from fedunfold.engines.simulation.backends.cpu.bindings import draw, is_built, shuffle

MAX_THREADS = 4
WORTH_THREADS = 100_000
"""Rows: of fewer, threads take as long to begin as to draw them."""


def shuffle_rows(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray, threads: int = 1) -> None:
    """Add to the rows of epochs what `rng.permutation` draws with their keys.

    Compiled code draws what numpy draws, in half the time, and of many rows with as many of the threads as help.

    Args:
        rows: Rows of the data [S, L, B], changed in place.
        keys: The Philox key of every epoch [N, 2].
        epochs: Client slot, first step and number of rows of every epoch [N, 3].
        threads: How many threads may be used.

    Raises:
        ValueError: If an epoch does not lie within the rows, or keys and epochs differ in number.
    """
    steps, slots, width = rows.shape
    slot, first, size = epochs.T
    if not ((slot < slots) & (first * width + size <= steps * width) & (epochs >= 0).all(1)).all():
        raise ValueError("there are epochs beyond the rows.")
    if keys.shape != (len(epochs), 2):
        raise ValueError(f"there are keys of shape {keys.shape} for {len(epochs)} epochs.")
    if _draws_as_numpy():
        shuffle(rows, keys, epochs, min(MAX_THREADS, threads) if size.sum() >= WORTH_THREADS else 1)
    else:
        _shuffle_by_numpy(rows, keys, epochs)


def last_rows(sizes: np.ndarray, wanted: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The last rows of the orders that `rng.permutation` draws, of which compiled code draws no more than these.

    Args:
        sizes: The number of rows of every order [N].
        wanted: How many of its last rows are returned [N].
        keys: The Philox key of every order [N, 2].

    Returns:
        These rows, one order after the other [wanted.sum()].

    Raises:
        ValueError: If more rows are wanted than an order has, or keys and orders differ in number.
    """
    if not ((wanted >= 0) & (wanted <= sizes)).all():
        raise ValueError("more rows are wanted than there are.")
    if keys.shape != (len(sizes), 2):
        raise ValueError(f"there are keys of shape {keys.shape} for {len(sizes)} epochs.")
    if not _draws_as_numpy():
        orders = [rng.permutation(size, key) for size, key in zip(sizes.tolist(), keys, strict=True)]
        return np.concatenate([order[len(order) - n :] for order, n in zip(orders, wanted.tolist(), strict=True)])
    ends = np.empty(wanted.sum(), dtype=np.int32)
    draw("last_rows", ends, keys, np.stack([sizes, wanted], 1))
    return ends


def _shuffle_by_numpy(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray) -> None:
    width = rows.shape[2]
    for key, (slot, first, size) in zip(keys, epochs.tolist(), strict=True):
        steps = -(-size // width)
        order = np.zeros(steps * width, dtype=np.int32)
        order[:size] = rng.permutation(size, key)
        rows[first : first + steps, slot] += order.reshape(steps, width)


@lru_cache(maxsize=1)
def _draws_as_numpy() -> bool:
    """Whether compiled code is built and draws as this numpy: numpy promises the stream of Philox, but not what
    `Generator.permutation` makes of it (NEP 19). Where it differs, numpy draws, and results stay those of numpy."""
    if not is_built():
        return False
    key, size = rng.philox_key(0, "as numpy"), 1000
    rows = np.zeros((1, 1, size), dtype=np.int32)
    shuffle(rows, key[None], np.array([[0, 0, size]]))
    return bool((rows[0, 0] == rng.permutation(size, key)).all())

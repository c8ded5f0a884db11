"""Orders of rows by compiled code against those of numpy, and those of numpy against its earlier ones."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core import rng
from fedunfold.core.participation import RoundRng
from fedunfold.engines.simulation.backends.cpu import bindings, is_built, permutations
from fedunfold.engines.simulation.backends.cpu.permutations import last_rows, shuffle_rows
from fedunfold.engines.simulation.batching import ClientSlice, plan_batches, sample_coefficients

compiled = pytest.mark.skipif(not is_built(), reason="the extension was not built, or is for other processors")


@pytest.mark.parametrize(
    ("size", "digest"),
    [(10, "f843b3a1a3841020"), (50, "ebd9939cd9b6ba0a"), (1000, "db2c76d399b1e0b4"), (65_537, "c62be9858745084f")],
)
def test_numpy_draws_as_it_always_did(size: int, digest: str) -> None:
    """NEP 19 lets `Generator.permutation` change. Where this fails, a seed no longer repeats earlier results, and
    `permutations.hpp` is no longer numpy's algorithm."""
    order = rng.permutation(size, np.array([3, 5], np.uint64))
    assert hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest


@compiled
@pytest.mark.parametrize("size", [1, 2, 3, 10, 50, 1000, 65_537])
def test_compiled_code_draws_what_a_generator_of_numpy_draws(size: int) -> None:
    """Beside numpy itself, without the generators of `rng`; `_draws_as_numpy` falls back without a word."""
    key, rows = np.array([3, 5], np.uint64), np.zeros((1, 1, size), dtype=np.int32)
    bindings.shuffle(rows, key[None], np.array([[0, 0, size]]))
    assert rows[0, 0].tolist() == np.random.Generator(np.random.Philox(key=key)).permutation(size).tolist()
    assert permutations._draws_as_numpy()


def shuffled(sizes: list[int], width: int, seed: int, *, by_numpy: bool, threads: int = 1) -> np.ndarray:
    """Epochs of other sizes in slots beside each other, from the second step on; rows begin at 1000 · slot."""
    steps = 1 + max(-(-size // width) for size in sizes)
    rows = np.empty((steps, len(sizes), width), dtype=np.int32)
    rows[:] = 1000 * np.arange(len(sizes), dtype=np.int32)[:, None]
    keys = np.array([rng.philox_key(seed, "test", slot) for slot in range(len(sizes))])
    epochs = np.array([(slot, 1, size) for slot, size in enumerate(sizes)])
    if by_numpy:
        permutations._shuffle_by_numpy(rows, keys, epochs)
    else:
        bindings.shuffle(rows, keys, epochs, threads)
    return rows


@compiled
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5), st.integers(1, 60), st.integers(0, 10**6), st.integers(1, 4)
)
def test_compiled_code_draws_as_numpy(sizes: list[int], width: int, seed: int, threads: int) -> None:
    found = shuffled(sizes, width, seed, by_numpy=False, threads=threads)
    assert (found == shuffled(sizes, width, seed, by_numpy=True)).all()


@compiled
@pytest.mark.parametrize("size", [2**k + more for k in (1, 5, 10, 16) for more in (-1, 0, 1)])
def test_compiled_code_draws_as_numpy_around_powers_of_two(size: int) -> None:
    assert (shuffled([size], 50, 3, by_numpy=False) == shuffled([size], 50, 3, by_numpy=True)).all()


@compiled
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=5), st.integers(0, 10**6))
def test_ends_of_orders_are_those_of_whole_ones(epochs: list[tuple[int, int]], seed: int) -> None:
    sizes = np.array([size for size, _ in epochs])
    wanted = np.array([min(size, n) for size, n in epochs])
    keys = np.array([rng.philox_key(seed, "test", n) for n in range(len(epochs))])
    orders = [rng.permutation(int(size), key) for size, key in zip(sizes, keys, strict=True)]
    expected = [row for order, n in zip(orders, wanted.tolist(), strict=True) for row in order[len(order) - n :]]
    assert last_rows(sizes, wanted, keys).tolist() == expected


@pytest.mark.parametrize(("wanted", "keys", "why"), [(5, 1, "wanted"), (-1, 1, "wanted"), (3, 2, "keys")])
def test_ends_that_there_are_not_are_refused(wanted: int, keys: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        last_rows(np.array([4]), np.array([wanted]), np.zeros((keys, 2), np.uint64))


def test_an_order_is_what_a_generator_of_its_own_gives() -> None:
    rows = np.full((3, 2, 4), 100, dtype=np.int32)
    key = rng.philox_key(1, "test")
    shuffle_rows(rows, key[None], np.array([[1, 1, 6]]))
    order = np.random.Generator(np.random.Philox(key=key)).permutation(6)
    assert rows[1:, 1].ravel().tolist() == [*(100 + order).tolist(), 100, 100]
    assert (rows[0] == 100).all()
    assert (rows[:, 0] == 100).all()


@compiled
def test_where_numpy_draws_otherwise_numpy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later numpy may: then compiled code is not used, and minibatches are those of numpy."""
    clients = [
        (RoundRng(0, "trial-0", 1), ClientSlice("a", 0, 40, 2)),
        (RoundRng(0, "trial-1", 1), ClientSlice("b", 40, 17, 1)),
    ]
    before, coefficients = plan_batches(clients, 10, 10).rows, sample_coefficients(clients, 10)
    drawn = rng.permutation
    monkeypatch.setattr(rng, "permutation", lambda size, key: drawn(size, key)[::-1])
    permutations._draws_as_numpy.cache_clear()
    try:
        assert not permutations._draws_as_numpy()
        after, others = plan_batches(clients, 10, 10).rows, sample_coefficients(clients, 10)
    finally:
        monkeypatch.undo()
        permutations._draws_as_numpy.cache_clear()
    assert (after[:4, 0].ravel() == before[:4, 0].ravel()[::-1]).all()
    assert others[:40].tolist() == coefficients[:40].tolist()  # all minibatches are whole
    assert others[40:].tolist() != coefficients[40:].tolist()
    assert permutations._draws_as_numpy()


@pytest.mark.parametrize("epoch", [(2, 0, 4), (0, 2, 5), (0, 0, 13), (-1, 0, 4), (0, -1, 4), (0, 0, -1)])
def test_epochs_beyond_the_rows_are_refused(epoch: tuple[int, int, int]) -> None:
    rows = np.zeros((3, 2, 4), dtype=np.int32)
    with pytest.raises(ValueError, match="beyond the rows"):
        shuffle_rows(rows, rng.philox_key(1, "test")[None], np.array([epoch]))
    assert not rows.any()


@compiled
def test_other_types_are_refused() -> None:
    rows, keys, epochs = np.zeros((3, 2, 4), np.int32), np.zeros((1, 2), np.uint64), np.array([[0, 0, 4]])
    for wrong in (
        (rows.astype(np.int64), keys, epochs),
        (rows[:, :, ::2], keys, epochs),
        (rows, keys.astype(np.int64), epochs),
        (rows, keys, epochs.astype(np.int32)),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            bindings.shuffle(*wrong)

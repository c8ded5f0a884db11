"""Draws as pure functions of what they are for."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core import rng

parts = st.lists(st.one_of(st.integers(-5, 5), st.text("ab-0", max_size=3)), max_size=3)
purposes = st.sampled_from(["presence", "minibatches", "model"])
seeds = st.integers(0, 2**63)


@given(seed=seeds, purpose=purposes, what=parts)
def test_the_same_draw_again(seed: int, purpose: str, what: list[str | int]) -> None:
    assert rng.integer(seed, purpose, *what) == rng.integer(seed, purpose, *what)
    first, again = (rng.uniforms(seed, purpose, what, ["a", "b"]) for _ in range(2))
    assert first.tolist() == again.tolist()
    one, other = (rng.generator(seed, purpose, *what) for _ in range(2))
    assert one.permutation(20).tolist() == other.permutation(20).tolist()


@given(seed=seeds, purpose=purposes, what=parts, size=st.integers(0, 50))
def test_permutations_are_those_of_a_generator_of_their_own(
    seed: int, purpose: str, what: list[str | int], size: int
) -> None:
    found = rng.permutation(size, rng.philox_key(seed, purpose, *what))
    assert found.tolist() == rng.generator(seed, purpose, *what).permutation(size).tolist()


def test_a_stream_set_to_its_beginning_is_a_fresh_one() -> None:
    """What numpy's Philox remembers of earlier draws, such as half a number or a filled buffer, must not matter."""
    keys = [rng.philox_key(0, "minibatches", i) for i in range(3)]
    for key in (*keys, *reversed(keys)):
        for size in (1, 7, 1000):
            fresh = np.random.Generator(np.random.Philox(key=key))
            assert rng.permutation(size, key).tolist() == fresh.permutation(size).tolist()
            assert str(rng._own.bits.state) == str(fresh.bit_generator.state)


@given(parts=st.lists(st.one_of(st.integers(), st.text())))
def test_draws_are_named_by_their_json(parts: list[str | int]) -> None:
    assert rng._text(parts) == json.dumps(parts)


@given(seed=seeds, purpose=purposes, what=parts)
def test_ranges(seed: int, purpose: str, what: list[str | int]) -> None:
    assert 0 <= rng.integer(seed, purpose, *what) < 2**63


@given(seed=seeds, purpose=purposes, what=parts, last=st.lists(st.text(), min_size=1))
def test_draws_of_many_are_those_of_each(seed: int, purpose: str, what: list[str | int], last: list[str]) -> None:
    together = rng.uniforms(seed, purpose, what, last)
    assert ((together >= 0) & (together < 1)).all()
    alone = [rng.integer(seed, purpose, *what, one) >> 10 for one in last]  # the same digest, 53 of its bits
    assert (together == np.array(alone, dtype=float) / 2.0**53).all()


@given(one=st.tuples(st.integers(0, 9), purposes, parts), other=st.tuples(st.integers(0, 9), purposes, parts))
def test_other_draws_differ(one: tuple[int, str, list[str | int]], other: tuple[int, str, list[str | int]]) -> None:
    first = rng.integer(one[0], one[1], *one[2])
    second = rng.integer(other[0], other[1], *other[2])
    assert (first == second) == (one == other)


def test_parts_that_read_alike_are_told_apart() -> None:
    drawn = {
        rng.integer(0, "p", "1"),
        rng.integer(0, "p", 1),
        rng.integer(0, "p", "1", ""),
        rng.integer(0, "p1"),
        rng.integer(0, "p", 11),
        rng.integer(0, "p", 1, 1),
        rng.integer(1, "p", 1),
    }
    assert len(drawn) == 7


def test_values_that_files_and_papers_rely_on() -> None:
    """Another value here means that no earlier run can be repeated."""
    assert rng.integer(0, "model", "trial-0") == 4815723831697992071
    assert rng.uniforms(0, "presence", ("trial-0", 3), ["a"])[0] == 0.8134381164204776
    stream = rng.generator(0, "minibatches", "trial-0", 3, "a", 1)
    assert stream.permutation(8).tolist() == [0, 7, 2, 5, 6, 4, 1, 3]


def test_uniform_is_uniform() -> None:
    values = np.array([rng.uniforms(0, "presence", ("run", t), ["a"])[0] for t in range(4000)])
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert abs(counts - 400).max() < 80  # four standard deviations
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08


def test_permutations_are_permutations() -> None:
    found = {tuple(rng.generator(0, "minibatches", "run", t, "a", 0).permutation(3).tolist()) for t in range(60)}
    assert len(found) == 6

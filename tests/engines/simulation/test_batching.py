"""Which minibatches are met."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.participation import RoundRng
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan
from fedunfold.engines.simulation.batching import BatchSampler, ClientSlice, plan_batches, sample_coefficients
from tests.support.federations import tiny

KEYS = ("a", "b", "c", "d", "e")
shares = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4)


def listed(sizes_and_epochs: list[tuple[int, int]]) -> list[ClientSlice]:
    start, out = 0, []
    for key, (size, epochs) in zip(KEYS, sizes_and_epochs, strict=False):
        out.append(ClientSlice(key, start, size, epochs))
        start += size
    return out


def planned(rng: RoundRng, clients: list[ClientSlice], batch_size: int) -> DeviceBatchPlan:
    return plan_batches(
        [(rng, own) for own in clients], batch_size, min(batch_size, max(own.size for own in clients))
    ).upload(torch.device("cpu"), torch.float64)


@given(size=st.integers(1, 20), epochs=st.integers(1, 4), batch_size=st.integers(1, 25))
def test_steps_count_minibatches(size: int, epochs: int, batch_size: int) -> None:
    per_epoch = len(range(0, size, batch_size))
    assert ClientSlice("a", 0, size, epochs).steps(batch_size) == epochs * per_epoch


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10), seed=st.integers(0, 99))
def test_every_slot_meets_its_clients_minibatches(clients: list[tuple[int, int]], batch_size: int, seed: int) -> None:
    rng, split = RoundRng(seed, "trial-0", 2), listed(clients)
    plan = planned(rng, split, batch_size)
    assert sorted(plan.order) == list(range(len(split)))
    for slot, index in enumerate(plan.order):
        own = split[index]
        expected = []
        for epoch in range(own.epochs):
            order = own.start + rng.permutation(own.client_id, epoch, own.size)
            expected += [order[b : b + batch_size].tolist() for b in range(0, own.size, batch_size)]
        met = [
            plan.rows[step, slot, :count].tolist() for step, count in enumerate(plan.counts[:, slot].tolist()) if count
        ]
        assert met == expected


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10))
def test_live_slots_come_first_and_padding_counts_nothing(clients: list[tuple[int, int]], batch_size: int) -> None:
    plan = planned(RoundRng(0, "trial-0", 0), listed(clients), batch_size)
    total = sum(size for size, _ in clients)
    assert int(plan.rows.min()) >= 0
    assert int(plan.rows.max()) < total
    for step, live in enumerate(plan.active):
        assert (plan.counts[step, :live] > 0).all()
        assert (plan.counts[step, live:] == 0).all()
        for slot, count in enumerate(plan.counts[step].tolist()):
            weights = plan.means[step, slot]
            assert weights[:count].tolist() == [1 / count] * count if count else True
            assert not weights[count:].any()


def test_a_plan_by_hand() -> None:
    """Sizes 2 and 5 in minibatches of 2: one step and three, the last of one row."""
    plan = planned(RoundRng(0, "trial-0", 0), [ClientSlice("a", 0, 2, 1), ClientSlice("b", 2, 5, 1)], 2)
    assert plan.order == (1, 0)
    assert plan.active == (2, 1, 1)
    assert plan.counts.tolist() == [[2, 2], [2, 0], [1, 0]]
    assert plan.means[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0]]
    assert sorted(plan.rows[0, 1].tolist()) == [0, 1]


def test_a_clients_minibatches_do_not_depend_on_the_others() -> None:
    rng = RoundRng(0, "trial-0", 0)
    own = ClientSlice("b", 2, 5, 2)
    alone = planned(rng, [own], 2)
    among = planned(rng, [ClientSlice("a", 0, 2, 1), own, ClientSlice("c", 7, 9, 3)], 2)
    slot = among.order.index(1)
    assert among.counts[:, slot].tolist()[:6] == alone.counts[:, 0].tolist()
    for step, count in enumerate(alone.counts[:, 0].tolist()):
        assert torch.equal(among.rows[step, slot, :count], alone.rows[step, 0, :count])


def test_every_epoch_is_reshuffled() -> None:
    plan = planned(RoundRng(0, "trial-0", 0), [ClientSlice("a", 0, 9, 3)], 9)
    epochs = {tuple(rows) for rows in plan.rows[:, 0].tolist()}
    assert len(epochs) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(9))}


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10), seed=st.integers(0, 99))
def test_sample_coefficients_are_the_means_a_sample_enters(
    clients: list[tuple[int, int]], batch_size: int, seed: int
) -> None:
    rng, split = RoundRng(seed, "learn-0", 1), listed(clients)
    expected: list[float] = []
    for own in split:
        entered: Counter[int] = Counter()
        for epoch in range(own.epochs):
            order = rng.permutation(own.client_id, epoch, own.size).tolist()
            for begin in range(0, own.size, batch_size):
                piece = order[begin : begin + batch_size]
                for row in piece:
                    entered[row] += 1 / len(piece)  # type: ignore[assignment]
        expected += [entered[row] for row in range(own.size)]
    found = sample_coefficients([(rng, own) for own in split], batch_size)
    assert found.tolist() == pytest.approx(expected)


# --- drawn ahead ---------------------------------------------------------------------------------------


def test_what_was_drawn_ahead_is_not_drawn_again_and_is_for_those_clients_alone() -> None:
    env = tiny(participation_probability=0.6)
    sampler = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    shares = [sampler.slices(1)[k] for k in range(3)]
    first, second = ([(RoundRng(sampler.seed, run, 1), own) for own in shares] for run in ("trial-0", "trial-1"))
    sampler.draw_ahead(first)
    sampler.upload_ahead()
    ahead = sampler.batches(list(first))
    assert ahead is sampler.batches(first)
    other = sampler.batches(second)
    assert other.rows.shape == ahead.rows.shape
    assert not torch.equal(other.rows, ahead.rows)
    alone = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    assert torch.equal(alone.batches(first).rows, ahead.rows)
    sampler.draw_ahead(second)
    assert torch.equal(sampler.batches(second).rows, other.rows), "also where it was not uploaded yet"


def test_slices_are_those_of_the_round() -> None:
    env = tiny({"a": 7, "b": 4}, epochs={"a": (1, 2, 3), "b": 2})
    sampler = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    for t in (0, 2, 1, 0):
        found = sampler.slices(t)
        assert [found[k] for k in range(2)] == [ClientSlice("a", 0, 7, t + 1), ClientSlice("b", 7, 4, 2)]
        assert found.steps(3).tolist() == [3 * (t + 1), 4]

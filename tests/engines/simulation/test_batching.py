"""Who is there, and which minibatches are met."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.engines.simulation.plan import plan, sample_coefficients
from fedunfold.engines.simulation.schedule import ClientSlice, DeviceBatchPlan, RoundRng

KEYS = ("a", "b", "c", "d", "e")
shares = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4)


def listed(sizes_and_epochs: list[tuple[int, int]]) -> list[ClientSlice]:
    start, out = 0, []
    for key, (size, epochs) in zip(KEYS, sizes_and_epochs, strict=False):
        out.append(ClientSlice(key, start, size, epochs))
        start += size
    return out


def planned(draw: RoundRng, clients: list[ClientSlice], batch_size: int) -> DeviceBatchPlan:
    return plan(
        [(draw, share) for share in clients], batch_size, min(batch_size, max(share.size for share in clients))
    ).on(torch.device("cpu"), torch.float64)


# --- presence ----------------------------------------------------------------------------------------------


def test_presence_is_as_frequent_as_the_client_is_reliable() -> None:
    participation_probability = [0.0, 0.2, 0.5, 0.9, 1.0]
    there = np.array([RoundRng(0, "trial-0", t).present(KEYS, participation_probability, None) for t in range(2000)])
    frequency = there.mean(0)
    assert frequency[0] == 0
    assert frequency[4] == 1
    assert frequency[1:4].tolist() == pytest.approx([0.2, 0.5, 0.9], abs=0.04)
    assert abs(np.corrcoef(there[:, 1], there[:, 2])[0, 1]) < 0.1


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), round=st.integers(0, 99), clients_per_round=st.integers(1, 5))
def test_sampling_draws_exactly_so_many(seed: int, round: int, clients_per_round: int) -> None:
    assert RoundRng(seed, "trial-0", round).present(KEYS, [1.0] * 5, clients_per_round).sum() == clients_per_round


def test_sampling_is_uniform() -> None:
    counts = sum(RoundRng(0, "trial-0", t).present(KEYS, [1.0] * 5, 2).astype(int) for t in range(1500))
    assert (np.asarray(counts) / 1500).tolist() == pytest.approx([0.4] * 5, abs=0.05)


def test_a_sampled_client_may_still_be_away() -> None:
    draws = [RoundRng(0, "trial-0", t) for t in range(200)]
    chosen = np.array([draw.present(KEYS, [1.0] * 5, 2) for draw in draws])
    reachable = np.array([draw.present(KEYS, [0.5] * 5, None) for draw in draws])
    both = np.array([draw.present(KEYS, [0.5] * 5, 2) for draw in draws])
    assert (both == (chosen & reachable)).all()
    assert 0 < both.sum() < chosen.sum()


@given(seed=st.integers(0, 10**6), some=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
def test_presence_does_not_depend_on_the_other_clients(seed: int, some: list[str]) -> None:
    draw = RoundRng(seed, "trial-0", 3)
    everyone = dict(zip(KEYS, draw.present(KEYS, [0.5] * 5, None).tolist(), strict=True))
    assert draw.present(some, [0.5] * len(some), None).tolist() == [everyone[key] for key in some]


@given(seed=st.integers(0, 10**6), order=st.permutations(KEYS), clients_per_round=st.integers(1, 4))
def test_sampling_does_not_depend_on_the_order(seed: int, order: list[str], clients_per_round: int) -> None:
    draw = RoundRng(seed, "trial-0", 3)
    listed = dict(zip(KEYS, draw.present(KEYS, [1.0] * 5, clients_per_round).tolist(), strict=True))
    assert draw.present(order, [1.0] * 5, clients_per_round).tolist() == [listed[key] for key in order]


def test_seed_run_and_round_each_change_the_draws() -> None:
    keys = tuple(f"client-{i}" for i in range(40))
    base = RoundRng(0, "trial-0", 0)
    for other in (RoundRng(1, "trial-0", 0), RoundRng(0, "trial-1", 0), RoundRng(0, "trial-0", 1)):
        for clients_per_round, participation_probability in ((None, 0.5), (20, 1.0)):
            one, two = (
                draw.present(keys, [participation_probability] * 40, clients_per_round) for draw in (base, other)
            )
            assert (one != two).any()
        assert (base.permutation("a", 0, 30) != other.permutation("a", 0, 30)).any()
    assert (base.permutation("a", 0, 30) != base.permutation("b", 0, 30)).any()
    assert (base.permutation("a", 0, 30) != base.permutation("a", 1, 30)).any()


# --- minibatches -------------------------------------------------------------------------------------------


@given(size=st.integers(1, 20), epochs=st.integers(1, 4), batch_size=st.integers(1, 25))
def test_steps_count_minibatches(size: int, epochs: int, batch_size: int) -> None:
    per_epoch = len(range(0, size, batch_size))
    assert ClientSlice("a", 0, size, epochs).steps(batch_size) == epochs * per_epoch


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10), seed=st.integers(0, 99))
def test_every_lane_walks_its_clients_minibatches(clients: list[tuple[int, int]], batch_size: int, seed: int) -> None:
    draw, split = RoundRng(seed, "trial-0", 2), listed(clients)
    schedule = planned(draw, split, batch_size)
    assert sorted(schedule.order) == list(range(len(split)))
    for lane, index in enumerate(schedule.order):
        share = split[index]
        expected = []
        for epoch in range(share.epochs):
            order = share.start + draw.permutation(share.key, epoch, share.size)
            expected += [order[b : b + batch_size].tolist() for b in range(0, share.size, batch_size)]
        met = [
            schedule.rows[step, lane, :count].tolist()
            for step, count in enumerate(schedule.counts[:, lane].tolist())
            if count
        ]
        assert met == expected


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10))
def test_live_lanes_come_first_and_padding_counts_nothing(clients: list[tuple[int, int]], batch_size: int) -> None:
    schedule = planned(RoundRng(0, "trial-0", 0), listed(clients), batch_size)
    total = sum(size for size, _ in clients)
    assert int(schedule.rows.min()) >= 0
    assert int(schedule.rows.max()) < total
    for step, live in enumerate(schedule.active):
        assert (schedule.counts[step, :live] > 0).all()
        assert (schedule.counts[step, live:] == 0).all()
        for lane, count in enumerate(schedule.counts[step].tolist()):
            weights = schedule.means[step, lane]
            assert weights[:count].tolist() == [1 / count] * count if count else True
            assert not weights[count:].any()


def test_a_schedule_by_hand() -> None:
    """Sizes 2 and 5 in minibatches of 2: one step and three, the last of one row."""
    schedule = planned(RoundRng(0, "trial-0", 0), [ClientSlice("a", 0, 2, 1), ClientSlice("b", 2, 5, 1)], 2)
    assert schedule.order == (1, 0)
    assert schedule.active == (2, 1, 1)
    assert schedule.counts.tolist() == [[2, 2], [2, 0], [1, 0]]
    assert schedule.means[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0]]
    assert sorted(schedule.rows[0, 1].tolist()) == [0, 1]


def test_a_clients_minibatches_do_not_depend_on_the_others() -> None:
    draw = RoundRng(0, "trial-0", 0)
    share = ClientSlice("b", 2, 5, 2)
    alone = planned(draw, [share], 2)
    among = planned(draw, [ClientSlice("a", 0, 2, 1), share, ClientSlice("c", 7, 9, 3)], 2)
    lane = among.order.index(1)
    assert among.counts[:, lane].tolist()[:6] == alone.counts[:, 0].tolist()
    for step, count in enumerate(alone.counts[:, 0].tolist()):
        assert torch.equal(among.rows[step, lane, :count], alone.rows[step, 0, :count])


def test_every_epoch_is_reshuffled() -> None:
    schedule = planned(RoundRng(0, "trial-0", 0), [ClientSlice("a", 0, 9, 3)], 9)
    epochs = {tuple(rows) for rows in schedule.rows[:, 0].tolist()}
    assert len(epochs) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(9))}


@settings(max_examples=40)
@given(clients=shares, batch_size=st.integers(1, 10), seed=st.integers(0, 99))
def test_sample_coefficients_are_the_means_a_sample_enters(
    clients: list[tuple[int, int]], batch_size: int, seed: int
) -> None:
    draw, split = RoundRng(seed, "learn-0", 1), listed(clients)
    expected: list[float] = []
    for share in split:
        entered: Counter[int] = Counter()
        for epoch in range(share.epochs):
            order = draw.permutation(share.key, epoch, share.size).tolist()
            for begin in range(0, share.size, batch_size):
                piece = order[begin : begin + batch_size]
                for row in piece:
                    entered[row] += 1 / len(piece)  # type: ignore[assignment]
        expected += [entered[row] for row in range(share.size)]
    found = sample_coefficients([(draw, share) for share in split], batch_size)
    assert found.tolist() == pytest.approx(expected)

"""Aggregations by hand, and what holds for all inputs: order, agreement, and one arbitrary client."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.aggregation import krum, mean, median, trimmed_mean
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import AGGREGATORS, Aggregator
from fedunfold.rules import size, uniform
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import check_learnable
from tests.support.federations import RUN, simulated, tiny

ROBUST = [median(), trimmed_mean(0.2), krum(1)]
ALL = [mean(), *ROBUST]


LAYOUT = ParamLayout()


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def equal(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


@st.composite
def rounds(draw: st.DrawFn, least: int = 5) -> tuple[Tensor, Tensor]:
    """Some clients' updates, and their weights."""
    n, d = draw(st.integers(least, 8)), draw(st.integers(1, 4))
    numbers = st.floats(-10, 10, width=32)
    updates = tensor(*(draw(st.lists(numbers, min_size=d, max_size=d)) for _ in range(n)))
    weights = tensor(*draw(st.lists(st.floats(0.05, 1.0), min_size=n, max_size=n)))
    return updates, weights / weights.sum()


def test_median_by_hand() -> None:
    updates = tensor([0.0, 5.0], [1.0, 4.0], [9.0, 3.0])
    assert median().combine(updates, equal(3), LAYOUT).tolist() == [1, 4]
    assert median().combine(updates[[0, 2]], equal(2), LAYOUT).tolist() == [4.5, 4]  # as usual, between the middle two
    assert median().combine(updates, tensor(0.2, 0.2, 0.6), LAYOUT).tolist() == [9, 3]
    assert median().combine(updates, tensor(0.3, 0.2, 0.5), LAYOUT).tolist() == [
        5,
        3.5,
    ]  # 9 begins where half of it ends
    assert median().combine(updates, tensor(0.1, 0.1, 0.2), LAYOUT).tolist() == pytest.approx([0.4 * 5, 0.4 * 3.5])


def test_trimmed_mean_by_hand() -> None:
    updates = tensor(*([x] for x in (100.0, 1.0, 2.0, 6.0, -50.0)))
    assert trimmed_mean(0.2).combine(updates, equal(5), LAYOUT).tolist() == pytest.approx([3])
    # A share of 0.3 cuts the lowest and half of the next, and as much at the other end: (½·1 + 2 + ½·6)/2.
    assert trimmed_mean(0.3).combine(updates, equal(5), LAYOUT).tolist() == pytest.approx([2.75])
    # Weights 0.5, 0.3 and 0.2 without 0.25 at either end: 0.25 of the first, 0.25 of the second.
    weighted = trimmed_mean(0.25).combine(tensor([0.0], [4.0], [10.0]), tensor(0.5, 0.3, 0.2), LAYOUT)
    assert weighted.tolist() == pytest.approx([2])


def test_krum_by_hand() -> None:
    """n = 5, f = 1: scores over the 2 nearest. At 0, 1, 2, 4 and 90 they are 1+4, 1+1, 1+4, 4+9 and 86² + 88²."""
    updates = tensor([0.0], [1.0], [2.0], [4.0], [90.0])
    assert krum(1).combine(updates, equal(5), LAYOUT).tolist() == pytest.approx([7 / 4])
    weights = tensor(0.1, 0.2, 0.1, 0.1, 0.5)  # of which 1/5, 2/5, 1/5 and 1/5 are left
    assert krum(1).combine(updates, weights, LAYOUT).tolist() == pytest.approx([(2 + 2 + 4) / 5])


def test_krum_measures_parameters_alone() -> None:
    updates = tensor([0.0, 50.0], [0.1, 0.0], [0.2, 0.0], [0.3, 0.0], [9.0, 0.0])
    layout = ParamLayout(("w",), (torch.Size([1]),), ("mean",), (torch.Size([1]),))
    found = krum(1).combine(updates, equal(5), layout)
    assert found.tolist() == pytest.approx([0.15, 12.5])


def test_krum_needs_enough() -> None:
    assert krum(2).min_updates == 7
    assert krum(2).combine(torch.ones(6, 2), equal(6), LAYOUT).tolist() == [0, 0]
    with pytest.raises(InputError, match="krum with 1 bad clients needs at least 5 clients, and there are 3"):
        run_rounds(simulated(tiny()), size(), 1, algorithm=Algorithm(aggregator=krum(1)))


def test_rounds_without_enough_are_named() -> None:
    env = tiny(dict.fromkeys("abcde", 6), participation_probability=0.7, rounds=4)
    (result,) = run_rounds(simulated(env), size(), 4, algorithm=Algorithm(aggregator=krum(1)))
    short = (result.participated.sum(1) < 5).nonzero().flatten().tolist()
    assert short
    assert result.warnings[-1].startswith("there was no step in round")
    assert str(short[0] + 1) in result.warnings[-1]


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@given(rounds(), st.randoms())
def test_the_order_of_the_clients_does_not_matter(rule: Aggregator, given: Any, random: Any) -> None:
    updates, weights = given
    order = list(range(len(updates)))
    random.shuffle(order)
    if rule.name == "krum":  # of equal scores the first are taken
        distances = torch.cdist(updates, updates).flatten().sort().values
        assume(bool((distances[len(updates) :].diff()[1::2] > 1e-3).all()))
    found, again = rule.combine(updates, weights, LAYOUT), rule.combine(updates[order], weights[order], LAYOUT)
    torch.testing.assert_close(found, again, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@given(rounds())
def test_where_all_agree_it_is_the_mean(rule: Aggregator, given: Any) -> None:
    updates, weights = given
    same = updates[:1].expand_as(updates)
    for total in (1.0, 0.3):  # of the weight, where some clients are absent
        torch.testing.assert_close(
            rule.combine(same, total * weights, LAYOUT), total * updates[0], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
@given(rounds(), st.floats(-1e12, 1e12))
def test_one_arbitrary_client_cannot_leave_the_others(rule: Aggregator, given: Any, far: float) -> None:
    """With a weight below the limit, wherever it goes: every coordinate stays within what the others span.

    Multi-Krum may take a bad update that lies near the others, no farther off than they are from each other.
    """
    updates, _ = given
    bad = torch.full_like(updates[:1], far)
    found = rule.combine(torch.cat([updates, bad]), equal(len(updates) + 1), LAYOUT)
    spread = float((updates.max(0).values - updates.min(0).values).norm()) if rule.name == "krum" else 0.0
    reach = 2 * len(updates) * spread + 1e-6
    assert bool((found >= updates.min(0).values - reach).all())
    assert bool((found <= updates.max(0).values + reach).all())


@given(rounds())
def test_the_mean_is_the_weighted_sum(given: Any) -> None:
    updates, weights = given
    torch.testing.assert_close(mean().combine(updates, weights, LAYOUT), weights @ updates)


@given(rounds())
def test_a_trimmed_mean_lies_between_mean_and_median(given: Any) -> None:
    updates, weights = given
    torch.testing.assert_close(
        trimmed_mean(1e-9).combine(updates, weights, LAYOUT), weights @ updates, atol=1e-6, rtol=1e-6
    )
    middle = trimmed_mean(0.5 - 1e-9).combine(updates, weights, LAYOUT)
    torch.testing.assert_close(middle, median().combine(updates, weights, LAYOUT), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: trimmed_mean(0.5), "between 0 and 0.5"),
        (lambda: trimmed_mean(math.nan), "between 0 and 0.5"),
        (lambda: krum(0), "at least 1, not 0"),
        (lambda: AGGREGATORS.parse("krum:num_byzantine=1.5"), "whole number of bad clients"),
        (lambda: AGGREGATORS.parse("krum:num_byzantine=inf"), "whole number of bad clients"),
        (lambda: AGGREGATORS.make("mode"), "unknown aggregator 'mode'; choose one of mean"),
        (lambda: Algorithm(aggregator="median"), "such as median"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()


def test_weights_are_learned_through_the_mean_alone() -> None:
    for rule in ROBUST:
        with pytest.raises(InputError, match=f"through the aggregator '{rule.name}'"):
            check_learnable(Algorithm(aggregator=rule))


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
def test_a_run_with_one_client_gone_mad(rule: Aggregator, absent: Absent) -> None:
    """Its model stays near that of a run without it, where the mean is carried far away."""
    env = tiny(dict.fromkeys("abcdefg", 9), epochs=1)
    data = env.load()
    start = simulated(env).initial_model(RUN)
    data.x[data.offsets[6] :] *= 1000
    found = {
        aggregator.name: run_rounds(
            simulated(env), uniform(), 2, algorithm=Algorithm(aggregator=aggregator, absent=absent)
        )[0].model
        for aggregator in (mean(), rule)
    }
    assert float((found[rule.name] - start).norm()) < 0.05 * float((found["mean"] - start).norm())

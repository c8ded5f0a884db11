"""Weights over the probability of being sampled: right in expectation."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.participation import RoundRng
from fedunfold.core.parts import ClientSampler, KnownClients, RoundDecision, Selection
from fedunfold.rules import Rule, size, unbiased
from fedunfold.selection import BySize, Importance, PowerOfChoice, RoundRobin, Uniform
from tests.support.federations import run_one, simulated, tiny

SIZES = np.array([10, 30, 60, 25])
NORMS: dict[Metric, np.ndarray] = {"norm": np.array([2.0, 0.5, np.nan, 1.0])}
NAMES = ("ann", "bob", "cleo", "dan")
DELTAS = torch.tensor([[1.0, -2.0, 0.0], [0.0, 4.0, 1.0], [-3.0, 1.0, 2.0], [5.0, 0.0, -1.0]], dtype=torch.float64)
FULL = torch.from_numpy(SIZES / SIZES.sum()) @ DELTAS


def report(sampler: ClientSampler, chosen: list[int], count: int) -> ClientUpdates:
    cohort = torch.zeros(4, dtype=torch.bool)
    cohort[chosen] = True
    known = KnownClients(7, NAMES, SIZES, NORMS if sampler.required_metrics else {})
    return ClientUpdates(
        round=7,
        client_ids=NAMES,
        num_examples=torch.from_numpy(SIZES),
        participated=cohort,
        num_steps=cohort.long(),
        cohort=cohort,
        selection=Selection(sampler, known, count),
    )


def decided(sampler: ClientSampler, chosen: list[int], count: int) -> RoundDecision:
    decision, _ = unbiased()(report(sampler, chosen, count), None)
    assert isinstance(decision, RoundDecision)
    assert float(decision.weights.sum()) == pytest.approx(1)
    return decision


def direction(sampler: ClientSampler, chosen: list[int], count: int) -> torch.Tensor:
    """s Σ_k Θ_k Δ_k."""
    decision = decided(sampler, chosen, count)
    return decision.step * decision.weights @ DELTAS


def test_by_hand() -> None:
    # p = 0.08, 0.24, 0.48, 0.2
    uniform = decided(Uniform(), [0, 3], 2)  # π = 1/2: v = 0.16 and 0.4
    assert uniform.step == pytest.approx(0.56)
    assert uniform.weights.tolist() == pytest.approx([2 / 7, 0, 0, 5 / 7])
    by_size = decided(BySize(), [0, 2], 2)  # π = 0.16, 0.48, 0.96, 0.4: v = 1/2 and 1/2
    assert by_size.step == pytest.approx(1)
    assert by_size.weights.tolist() == pytest.approx([0.5, 0, 0.5, 0])
    # the last norms are 2, 0.5, their mean 3.5/3 for one who was not seen, and 1
    importance = decided(Importance(), [1, 2], 1)
    total = 3.5 + 3.5 / 3
    values = 0.24 * total / 0.5, 0.48 * total / (3.5 / 3)
    assert importance.step == pytest.approx(sum(values))
    assert importance.weights.tolist() == pytest.approx([0, values[0] / sum(values), values[1] / sum(values), 0])


def cohorts(sampler: ClientSampler, count: int) -> Iterator[tuple[float, list[int]]]:
    """Every cohort of a systematic sampler, and how likely it is: over all orders of four tickets and all offsets u
    between which nothing changes. Tickets are made that have a given order and a given fractional part of their sum."""
    known = KnownClients(7, NAMES, SIZES, NORMS if sampler.required_metrics else {})
    inclusion = sampler.inclusion(known, count)
    assert inclusion is not None
    for ranks in permutations(range(4)):
        ends = np.cumsum(inclusion[np.argsort(ranks)]) % 1
        # u is a multiple of 2⁻³²: what lies between two that are closer is rounding of an end
        for low, high in pairwise(sorted({0.0, 1.0, *ends.round(12).tolist()})):
            tickets = np.array(ranks) * 1e-3
            tickets[int(np.argmax(ranks))] += ((low + high) / 2 - tickets.sum()) % 1
            yield (high - low) / 24, sampler.sample(tickets, known, count).tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sampler", [BySize(), Importance()], ids=lambda sampler: sampler.name)
def test_the_expectation_is_the_mean_over_all_clients(sampler: ClientSampler, count: int) -> None:
    """E[s Σ_k Θ_k Δ_k] = Σ_k p_k Δ_k, by enumeration; size weights over the cohort are biased."""
    mean, plain, likely = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.0
    for probability, chosen in cohorts(sampler, count):
        likely += probability
        mean += probability * direction(sampler, chosen, count)
        shares = torch.from_numpy(SIZES[chosen] / SIZES[chosen].sum())
        plain += probability * (shares @ DELTAS[chosen])
    assert likely == pytest.approx(1)
    torch.testing.assert_close(mean, FULL, rtol=1e-9, atol=1e-9)
    if count > 1 or sampler.name == "importance":
        assert float((plain - FULL).norm()) > 0.05


@drawn_from(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=8),
    absent=st.lists(st.booleans(), min_size=8, max_size=8),
    data=st.data(),
)
def test_weights_lie_on_the_simplex_of_the_cohort(sizes: list[int], absent: list[bool], data: st.DataObject) -> None:
    """Whoever of the cohort is absent, and in whatever order clients are listed."""
    clients, tickets = len(sizes), data.draw(st.permutations([k / 8 for k in range(len(sizes))]))
    count, ids = data.draw(st.integers(1, clients)), tuple("abcdefgh"[:clients])
    known = KnownClients(0, ids, np.array(sizes), {"norm": np.where(absent[:clients], np.nan, sizes)})
    for sampler in (Uniform(), BySize(), Importance()):
        cohort = torch.zeros(clients, dtype=torch.bool)
        cohort[sampler.sample(np.array(tickets), known, count)] = True
        here = cohort & ~torch.tensor(absent[:clients])
        given = ClientUpdates(0, ids, torch.tensor(sizes), here, here.long(), cohort=cohort)
        decision, _ = unbiased()(replace(given, selection=Selection(sampler, known, count)), None)
        assert isinstance(decision, RoundDecision)
        assert torch.equal(decision.weights > 0, cohort)
        assert float(decision.weights.sum()) == pytest.approx(1)
        order = data.draw(st.permutations(range(clients)))
        norm: dict[Metric, np.ndarray] = {"norm": known.metrics["norm"][order]}
        other = KnownClients(0, tuple(ids[k] for k in order), known.num_examples[order], norm)
        listed = ClientUpdates(0, tuple(other.client_ids), given.num_examples[order], here[order], here[order].long())
        listed = replace(listed, cohort=cohort[order], selection=Selection(sampler, other, count))
        relisted, _ = unbiased()(listed, None)
        assert isinstance(relisted, RoundDecision)
        assert relisted.step == pytest.approx(decision.step)
        torch.testing.assert_close(relisted.weights, decision.weights[order])


def test_by_size_the_step_is_one() -> None:
    for count in (1, 2, 3, 4):
        steps = [decided(BySize(), chosen, count).step for _, chosen in cohorts(BySize(), count)]
        assert steps == pytest.approx([1.0] * len(steps))


@pytest.mark.parametrize("sampler", [Uniform(), BySize(), Importance()], ids=lambda sampler: sampler.name)
def test_the_mean_over_many_rounds(sampler: ClientSampler) -> None:
    """The same over 8,000 rounds as they are drawn in a run, within 4.5 standard errors."""
    norms = {name: torch.from_numpy(values) for name, values in NORMS.items()}
    drawn = []
    for t in range(8000):
        found = RoundRng(0, "trial-0", t).participation(NAMES, [1.0] * 4, SIZES, 2, sampler, norms)
        drawn.append(direction(sampler, np.flatnonzero(found.cohort).tolist(), 2))
    rows = torch.stack(drawn)
    error = rows.std(0) / len(rows) ** 0.5
    assert ((rows.mean(0) - FULL).abs() <= 4.5 * error).all()


def test_with_everybody_it_is_size() -> None:
    for count in (None, 3):
        env = tiny(client_sampler="round-robin", clients_per_round=count)
        ours, theirs = (run_one(simulated(env), rule, 2) for rule in (unbiased(), size()))
        torch.testing.assert_close(ours.model, theirs.model, rtol=1e-12, atol=1e-12)


def test_the_step_is_taken() -> None:
    """By size with C = 2 of sizes 7, 4 and 9: one round moves by Σ_k v_k Δ_k, v_k = (N_k/20)/π_k."""
    env = tiny(clients_per_round=2, client_sampler="by-size", rounds=1)
    seen: list[ClientUpdates] = []

    def watching(updates: ClientUpdates, state: None) -> tuple[RoundDecision, None]:
        seen.append(updates)
        decision, _ = unbiased()(updates, state)
        assert isinstance(decision, RoundDecision)
        return decision, None

    federation = simulated(env)
    model = run_one(federation, Rule("watching", watching), 1).model
    values = torch.from_numpy(np.array([7, 4, 9]) / 20 / np.array([0.7, 0.4, 0.9]))
    moved = values[seen[0].updates.clients] @ seen[0].updates.rows
    torch.testing.assert_close(model, federation.initial_model("trial-0") + moved, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sampler", [PowerOfChoice(), RoundRobin()], ids=lambda sampler: sampler.name)
def test_samplers_without_probabilities_are_named(sampler: ClientSampler) -> None:
    with pytest.raises(InputError, match=f"in round 7 needs the probabilities .* client sampler '{sampler.name}' does"):
        unbiased()(report(sampler, [0, 1], 2), None)


def test_where_nobody_knows_how_the_cohort_was_sampled() -> None:
    given = ClientUpdates(0, NAMES, torch.from_numpy(SIZES), torch.ones(4, dtype=torch.bool), torch.ones(4))
    with pytest.raises(InputError, match="in round 0 needs to know how the cohort was sampled"):
        unbiased()(given, None)

"""The samplers one by one, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.messages import Metric
from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients
from fedunfold.selection import BySize, Importance, PowerOfChoice, RoundRobin, Uniform

NAN = np.nan
SIZES = (10, 30, 60, 20)
ALL: list[ClientSampler] = [Uniform(), BySize(), Importance(), PowerOfChoice(), RoundRobin()]


def known(
    sizes: tuple[int, ...] = SIZES, *, norm: list[float] | None = None, start_loss: list[float] | None = None
) -> KnownClients:
    nothing = [NAN] * len(sizes)
    reported: dict[Metric, np.ndarray] = {
        "norm": np.array(norm or nothing),
        "start_loss": np.array(start_loss or nothing),
    }
    return KnownClients(0, [f"client-{k}" for k in range(len(sizes))], np.array(sizes), reported)


@given(
    seed=st.integers(0, 10**6),
    t=st.integers(0, 20),
    order=st.permutations(range(5)),
    count=st.integers(1, 4),
    some=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_so_many_whoever_is_listed_first(seed: int, t: int, order: list[int], count: int, some: list[bool]) -> None:
    stream = np.random.default_rng(seed)
    names, sizes = np.array(["eve", "ann", "dan", "bob", "cleo"]), stream.integers(1, 100, 5)
    numbers: tuple[Metric, ...] = ("norm", "start_loss")
    metrics = {name: np.where(some, stream.uniform(size=5), NAN) for name in numbers}
    tickets = stream.uniform(size=5)
    for sampler in ALL:
        listed = sampler.sample(tickets, KnownClients(t, names.tolist(), sizes, metrics), count)
        assert len(set(listed.tolist())) == count
        other = KnownClients(t, names[order].tolist(), sizes[order], {name: v[order] for name, v in metrics.items()})
        relisted = sampler.sample(tickets[order], other, count)
        assert set(names[order][relisted]) == set(names[listed])


def test_by_size() -> None:
    assert BySize().inclusion(known(), 1).tolist() == pytest.approx([1 / 12, 1 / 4, 1 / 2, 1 / 6])
    # 2 · 60/120 is 1: always in the cohort
    assert BySize().inclusion(known(), 2).tolist() == pytest.approx([1 / 6, 1 / 2, 1, 1 / 3])


def test_importance() -> None:
    nobody = Importance().inclusion(known(), 2)
    assert nobody.tolist() == [0.5] * 4, "before anybody has taken part all are alike"
    some = Importance().inclusion(known(norm=[1.0, NAN, 2.0, NAN]), 1)
    assert some.tolist() == pytest.approx([1 / 6, 1.5 / 6, 2 / 6, 1.5 / 6]), "unseen ones count as the mean, 1.5"
    assert Importance().inclusion(known(norm=[0.0, 3.0, 1.0, 0.0]), 1).tolist() == pytest.approx([0, 0.75, 0.25, 0])
    still = Importance().inclusion(known(norm=[0.0, 0.0, 0.0, 0.0]), 2)
    assert still.tolist() == [0.5] * 4


def test_power_of_choice() -> None:
    # −ln(1 − u)/N_k: 0.0511, 0.0231, 0.0153, 0.0526; the candidates come in the order 2, 1, 0, 3
    tickets = np.array([0.4, 0.5, 0.6, 0.65])
    losses = [0.9, 0.2, 0.5, 2.0]

    def drawn(candidates: int, count: int, losses: list[float]) -> list[int]:
        return list(PowerOfChoice(candidates).sample(tickets, known(start_loss=losses), count))

    assert drawn(1, 1, losses) == [2], "one candidate: by size"
    assert drawn(2, 1, losses) == [2]
    assert drawn(3, 1, losses) == [0]
    assert drawn(4, 1, losses) == [3]
    assert drawn(0, 1, losses) == [2], "twice the cohort"
    assert drawn(99, 2, losses) == [3, 0], "all there are"
    assert drawn(3, 2, [0.9, 0.2, NAN, NAN]) == [2, 0], "unseen ones come first"
    assert drawn(4, 2, [0.9, NAN, NAN, NAN]) == [2, 1], "among them who was drawn first"
    with pytest.raises(InputError, match="round 0: client sampler power-of-choice has 2 candidates for a cohort of 3"):
        drawn(2, 3, losses)


def test_candidates_are_drawn_by_size_without_replacement() -> None:
    """P(a pair) = p_i p_j/(1 − p_i) + p_j p_i/(1 − p_j), over 20,000 draws within 4.5 standard deviations."""
    stream, draws, p = np.random.default_rng(0), 20_000, np.array([0.1, 0.3, 0.6])
    sampler, found = PowerOfChoice(candidates=2), known(sizes=(10, 30, 60), start_loss=[0.0, 0.0, 0.0])
    pairs = [tuple(sorted(sampler.sample(stream.uniform(size=3), found, 2).tolist())) for _ in range(draws)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        likely = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        assert pairs.count((i, j)) / draws == pytest.approx(likely, abs=4.5 * np.sqrt(likely * (1 - likely) / draws))


@pytest.mark.parametrize("given", [-1, 2.5])
def test_candidates_are_a_whole_number(given: float) -> None:
    with pytest.raises(InputError, match="power-of-choice needs a whole number of candidates >= 0"):
        CLIENT_SAMPLERS.parse(f"power-of-choice:candidates={given}")


def test_round_robin() -> None:
    names = ["dan", "ann", "eve", "bob", "cleo"]
    rounds = [
        [names[k] for k in RoundRobin().sample(np.zeros(5), KnownClients(t, names, np.ones(5)), 2)] for t in range(6)
    ]
    assert rounds[:3] == [["ann", "bob"], ["cleo", "dan"], ["eve", "ann"]]
    assert [sum(name in cohort for cohort in rounds[:5]) for name in names] == [2] * 5, "5 cohorts of 2 of 5 clients"
    assert rounds[5] == rounds[0]


@pytest.mark.parametrize("sampler", [PowerOfChoice(), RoundRobin()], ids=lambda sampler: sampler.name)
def test_without_probabilities(sampler: ClientSampler) -> None:
    assert sampler.inclusion(known(), 2) is None


def test_names() -> None:
    assert CLIENT_SAMPLERS.parse("by-size") == BySize()
    assert CLIENT_SAMPLERS.parse("power-of-choice:candidates=20") == PowerOfChoice(candidates=20)
    assert {sampler.name for sampler in ALL} == set(CLIENT_SAMPLERS.names())

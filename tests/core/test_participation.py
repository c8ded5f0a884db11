"""Who takes part in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.participation import Participation, RoundRng, epochs_at
from fedunfold.core.parts import ClientSampler, KnownClients
from fedunfold.selection import Uniform

KEYS = ("a", "b", "c", "d", "e")


def taking_part(
    rng: RoundRng, keys: Sequence[str], probabilities: Sequence[float], clients_per_round: int | None
) -> Participation:
    return rng.participation(keys, probabilities, np.ones(len(keys)), clients_per_round, Uniform())


def participating(
    rng: RoundRng, keys: Sequence[str], probabilities: Sequence[float], clients_per_round: int | None
) -> np.ndarray:
    return taking_part(rng, keys, probabilities, clients_per_round).participating


def test_participation_is_as_frequent_as_its_probability() -> None:
    probabilities = [0.0, 0.2, 0.5, 0.9, 1.0]
    found = np.array([participating(RoundRng(0, "trial-0", t), KEYS, probabilities, None) for t in range(2000)])
    frequency = found.mean(0)
    assert frequency[0] == 0
    assert frequency[4] == 1
    assert frequency[1:4].tolist() == pytest.approx([0.2, 0.5, 0.9], abs=0.04)
    assert abs(np.corrcoef(found[:, 1], found[:, 2])[0, 1]) < 0.1


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), t=st.integers(0, 99), clients_per_round=st.integers(1, 5))
def test_sampling_draws_exactly_so_many(seed: int, t: int, clients_per_round: int) -> None:
    assert participating(RoundRng(seed, "trial-0", t), KEYS, [1.0] * 5, clients_per_round).sum() == clients_per_round


def test_sampling_is_uniform() -> None:
    counts = sum(participating(RoundRng(0, "trial-0", t), KEYS, [1.0] * 5, 2).astype(int) for t in range(1500))
    assert (np.asarray(counts) / 1500).tolist() == pytest.approx([0.4] * 5, abs=0.05)


def test_a_sampled_client_may_still_be_absent() -> None:
    rngs = [RoundRng(0, "trial-0", t) for t in range(200)]
    chosen = np.array([participating(rng, KEYS, [1.0] * 5, 2) for rng in rngs])
    reachable = np.array([participating(rng, KEYS, [0.5] * 5, None) for rng in rngs])
    both = np.array([participating(rng, KEYS, [0.5] * 5, 2) for rng in rngs])
    assert (both == (chosen & reachable)).all()
    assert 0 < both.sum() < chosen.sum()


@given(seed=st.integers(0, 10**6), some=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
def test_participation_does_not_depend_on_the_other_clients(seed: int, some: list[str]) -> None:
    rng = RoundRng(seed, "trial-0", 3)
    everyone = dict(zip(KEYS, participating(rng, KEYS, [0.5] * 5, None).tolist(), strict=True))
    assert participating(rng, some, [0.5] * len(some), None).tolist() == [everyone[key] for key in some]


@given(seed=st.integers(0, 10**6), order=st.permutations(KEYS), clients_per_round=st.integers(1, 4))
def test_sampling_does_not_depend_on_the_order(seed: int, order: list[str], clients_per_round: int) -> None:
    rng = RoundRng(seed, "trial-0", 3)
    listed = dict(zip(KEYS, participating(rng, KEYS, [1.0] * 5, clients_per_round).tolist(), strict=True))
    assert participating(rng, order, [1.0] * 5, clients_per_round).tolist() == [listed[key] for key in order]


def test_seed_run_and_round_each_change_the_draws() -> None:
    keys = tuple(f"client-{i}" for i in range(40))
    base = RoundRng(0, "trial-0", 0)
    for other in (RoundRng(1, "trial-0", 0), RoundRng(0, "trial-1", 0), RoundRng(0, "trial-0", 1)):
        for clients_per_round, participation_probability in ((None, 0.5), (20, 1.0)):
            one, two = (
                participating(rng, keys, [participation_probability] * 40, clients_per_round) for rng in (base, other)
            )
            assert (one != two).any()
        assert (base.permutation("a", 0, 30) != other.permutation("a", 0, 30)).any()
    assert (base.permutation("a", 0, 30) != base.permutation("b", 0, 30)).any()
    assert (base.permutation("a", 0, 30) != base.permutation("a", 1, 30)).any()


def test_who_was_not_sampled_is_not_absent() -> None:
    found = [taking_part(RoundRng(0, "trial-0", t), KEYS, [0.5] * 5, 2) for t in range(100)]
    assert {int(taking.cohort.sum()) for taking in found} == {2}
    assert {int(taking.absent.sum()) for taking in found} == {0, 1, 2}
    for taking in found:
        assert (taking.absent == (taking.cohort & ~taking.participating)).all()
        assert not (taking.participating & ~taking.cohort).any()


def test_the_final_evaluation_repeats_the_last_rounds_epochs() -> None:
    assert [epochs_at((1, 2, 3), t) for t in range(4)] == [1, 2, 3, 3]
    assert epochs_at(2, 7) == 2


@dataclass(frozen=True)
class Answering(ClientSampler):
    """Always the same answer."""

    name: ClassVar[str] = "answering"
    answer: tuple[int, ...] = ()

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        return np.array(self.answer)


@pytest.mark.parametrize("answer", [(), (0,), (0, 0), (0, 1, 2), (3, 5), (-1, 0)])
def test_a_sampler_that_names_others_than_so_many_clients_is_refused(answer: tuple[int, ...]) -> None:
    rng = RoundRng(0, "trial-0", 7)
    with pytest.raises(InputError, match="round 7: client sampler 'answering' must name 2 different clients"):
        rng.participation(KEYS, [1.0] * 5, np.ones(5), 2, Answering(answer))
    found = rng.participation(KEYS, [1.0] * 5, np.ones(5), 2, Answering((3, 1)))
    assert found.cohort.tolist() == [False, True, False, True, False]

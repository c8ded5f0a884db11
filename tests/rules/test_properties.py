"""What holds for every rule whatever the clients report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.core.messages import ClientUpdates
from fedunfold.rules import (
    Rule,
    afl,
    dr,
    fedadp,
    fedawa,
    fedbuff,
    feddisco,
    fedfa,
    fedlaw,
    online_hypergradient,
    q_fedavg,
    size,
    uniform,
)
from fedunfold.rules.rule import decide
from tests.rules.test_fedlaw import towards
from tests.support.reports import report

RULES = [
    size(),
    uniform(),
    dr(),
    dr(q=0, loss="start"),
    dr(q=300),
    fedadp(),
    fedadp(beta=50),
    fedbuff(),
    fedbuff(a=2, by="size"),
    fedfa(),
    fedfa(gamma=1),
    fedfa(gamma=0),
    fedlaw(epochs=3),
    feddisco(),
    feddisco(a=3, b=0, distance="l2"),
    q_fedavg(),
    q_fedavg(q=0),
    q_fedavg(q=300, lr=0.01),
    afl(),
    afl(gamma=10),
    fedawa(lr=0.5),
    online_hypergradient(step_size=0.1),
]


@dataclass(frozen=True)
class Answer:
    """What one client would report in one round."""

    participated: bool
    loss: float
    accuracy: float
    gradient: tuple[float, ...]
    labels: tuple[int, ...]


def answers(losses: st.SearchStrategy[float], coordinates: st.SearchStrategy[float]) -> st.SearchStrategy[Answer]:
    return st.builds(
        Answer,
        participated=st.booleans(),
        loss=losses,
        accuracy=st.integers(0, 50).map(lambda hits: hits / 50),
        gradient=st.tuples(coordinates, coordinates),
        labels=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    )


def runs(answer: st.SearchStrategy[Answer]) -> st.SearchStrategy[tuple[list[int], list[list[Answer]]]]:
    """Client sizes [K] and what clients answer [T][K]."""

    def of(clients: int) -> st.SearchStrategy[tuple[list[int], list[list[Answer]]]]:
        row = st.lists(answer, min_size=clients, max_size=clients)
        sizes = st.lists(st.integers(1, 10_000), min_size=clients, max_size=clients)
        return st.tuples(sizes, st.lists(row, min_size=1, max_size=4))

    return st.integers(1, 5).flatmap(of)


# Whole numbers, so that no angle hangs on the last bit, in which the order of summation shows.
tame = answers(st.sampled_from([math.nan, 0.0, 0.5, 1.0, 2.0, 7.0]), st.integers(-3, 3).map(float))
wild = answers(st.floats(0, 2.0**100, width=32) | st.just(math.nan), st.floats(-(2.0**40), 2.0**40, width=32))


def weights_over_rounds(
    rule: Rule,
    sizes: Sequence[int],
    rounds: Sequence[Sequence[Answer]],
    order: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Θ of every round with the clients listed in this order; their keys stay theirs."""
    state, weights = None, []
    for t, row in enumerate(rounds):
        listed = [row[k] for k in order]
        vectors = [answer.gradient for answer in listed if answer.participated]
        rows = torch.tensor(vectors, dtype=dtype).reshape(-1, 2)
        here: ClientUpdates = report(
            [sizes[k] for k in order],
            round=t,
            client_ids=[f"client-{k}" for k in order],
            participated=[answer.participated for answer in listed],
            loss=[answer.loss for answer in listed],
            start_loss=[answer.loss for answer in listed],
            accuracy=[answer.accuracy if answer.participated else math.nan for answer in listed],
            gradients=rows,
            updates=rows,
            norm=[math.hypot(*answer.gradient) if answer.participated else math.nan for answer in listed],
            num_steps=[2 if answer.participated else 0 for answer in listed],
            label_counts=[answer.labels for answer in listed],
            lr=0.5,
            model=torch.tensor([3.0, -1.0], dtype=dtype),
        )
        here = replace(here, server_data=towards(1.0, -2.0))
        decision, state = decide(rule, here, state)
        weights.append(decision.weights)
    return weights


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@settings(deadline=None)  # the first call into torch is slow
@given(run=runs(wild))
def test_weights_lie_on_the_simplex(rule: Rule, run: tuple[list[int], list[list[Answer]]]) -> None:
    sizes, rounds = run
    for theta in weights_over_rounds(rule, sizes, rounds, range(len(sizes)), torch.float32):
        assert theta.shape == (len(sizes),)
        assert theta.dtype == torch.float64
        assert (theta >= 0).all()
        assert float(theta.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@settings(deadline=None)  # the first call into torch is slow
@given(run=runs(tame), data=st.data())
def test_listing_the_clients_otherwise_lists_the_weights_otherwise(
    rule: Rule, run: tuple[list[int], list[list[Answer]]], data: st.DataObject
) -> None:
    sizes, rounds = run
    order = data.draw(st.permutations(range(len(sizes))))
    listed = weights_over_rounds(rule, sizes, rounds, range(len(sizes)), torch.float64)
    relisted = weights_over_rounds(rule, sizes, rounds, order, torch.float64)
    for theta, permuted in zip(listed, relisted, strict=True):
        torch.testing.assert_close(permuted, theta[list(order)], rtol=1e-5, atol=1e-6)


ONLY_PARTICIPANTS = [
    fedadp(),
    fedfa(),
    fedlaw(epochs=3),
    feddisco(),
    afl(),
    fedawa(lr=0.5),
    online_hypergradient(step_size=0.1),
]


@pytest.mark.parametrize("rule", ONLY_PARTICIPANTS, ids=lambda rule: rule.name)
@settings(deadline=None)  # the first call into torch is slow
@given(run=runs(tame))
def test_absent_clients_get_nothing_while_someone_participates(
    rule: Rule, run: tuple[list[int], list[list[Answer]]]
) -> None:
    sizes, rounds = run
    thetas = weights_over_rounds(rule, sizes, rounds, range(len(sizes)), torch.float64)
    for theta, row in zip(thetas, rounds, strict=True):
        if any(answer.participated for answer in row):
            assert all(answer.participated or weight == 0 for weight, answer in zip(theta, row, strict=True))

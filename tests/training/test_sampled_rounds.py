"""Runs in which a cohort is sampled for every round, written out in plain PyTorch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.local import nova, sgd
from fedunfold.rules import dr
from tests.support.federations import (
    RUN,
    SIZES,
    Plain,
    assert_same,
    final_model,
    mlp,
    participation,
    run_one,
    simulated,
    tiny,
    train,
)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("reachable", [1.0, 0.6])
def test_sampled_clients_in_a_run(absent: Absent, reachable: float) -> None:
    """Size weights over the cohort (and, under remember, over all that have ever sent an update), written out."""
    sizes = {"a": 7, "b": 4, "c": 9, "d": 6}
    env = tiny(sizes, rounds=4, clients_per_round=2, participation_probability=reachable, seed=5)
    plain = Plain(env, mlp(env))
    w = simulated(env).initial_model(RUN)
    memory: dict[int, Tensor] = {}
    seen = set()
    for t in range(env.rounds):
        taking_part = participation(env, RUN, t)
        assert taking_part.cohort.sum() == 2
        seen |= set(taking_part.cohort.nonzero()[0].tolist())
        here = taking_part.participating.nonzero()[0].tolist()
        fresh = {k: plain.train(w, t, k).model - w for k in here}
        memory |= fresh
        moves = memory if absent == "remember" else fresh
        among = set(moves) | (set() if absent == "drop" else set(taking_part.cohort.nonzero()[0].tolist()))
        total = sum(plain.shares[k] for k in among)
        for k, move in moves.items():
            w = w + plain.shares[k] / total * move
    assert len(seen) > 2
    assert_same(final_model(env, sgd(), absent=absent), w)


def test_nova_counts_the_steps_of_the_cohort_alone() -> None:
    """τ_eff = Σ_k (N_k/N_C) τ_k over the clients sampled, of whom one is absent in some rounds."""
    sizes = {"a": 7, "b": 4, "c": 9, "d": 6}
    env = tiny(sizes, rounds=4, clients_per_round=3, participation_probability=0.7, seed=2)
    plain = Plain(env, mlp(env))
    w = simulated(env).initial_model(RUN)
    absences = 0
    for t in range(env.rounds):
        taking_part = participation(env, RUN, t)
        cohort = taking_part.cohort.nonzero()[0].tolist()
        absences += int(taking_part.absent.sum())
        shares = {k: plain.shares[k] / sum(plain.shares[c] for c in cohort) for k in cohort}
        steps = plain.steps(t)
        effective = sum(shares[k] * steps[k] for k in cohort)
        models = {k: plain.train(w, t, k, scale=effective / steps[k]).model for k in cohort if steps[k]}
        w = w + torch.stack([shares[k] * (model - w) for k, model in models.items()]).sum(0)
    assert absences
    assert_same(final_model(env, nova()), w)


def test_clients_that_were_not_sampled_are_not_evaluated() -> None:
    """Losses of the cohort alone are reported, absent ones' too; the others' are unknown."""
    env = tiny(clients_per_round=2, participation_probability=0.5, rounds=6, seed=1)
    federation = simulated(env)
    absences = 0
    for t in range(env.rounds):
        outer = OUTER_LOSSES.make("path")
        more: dict[str, Any] = {"outer": outer, "path_gradient": True, "absent_loss": "evaluate"}
        found = train(federation, "loss", "start_loss", "accuracy", round=t, **more)
        taking_part = participation(env, RUN, t)
        assert found.cohort.tolist() == taking_part.cohort.tolist()
        assert found.participated.tolist() == taking_part.participating.tolist()
        assert (~found.metric("loss").isnan()).tolist() == found.cohort.tolist()
        assert (~found.metric("start_loss").isnan()).tolist() == found.cohort.tolist()
        assert (~found.metric("accuracy").isnan()).tolist() == found.participated.tolist()
        plain, start = Plain(env, mlp(env)), federation.initial_model(RUN)
        met = sum(
            sum(plain.train(start, t, k).losses if found.participated[k] else plain.losses_at(start, t, k))
            for k in range(3)
            if found.cohort[k]
        )
        assert found.outer.loss == pytest.approx(met)
        absences += int(taking_part.absent.sum())
    assert absences


@settings(max_examples=8)
@given(order=st.permutations(list(SIZES)), seed=st.integers(0, 50))
def test_listing_sampled_clients_otherwise_only_reorders(order: list[str], seed: int) -> None:
    absents: list[Absent] = ["keep", "drop", "remember"]
    for absent in absents:
        results = []
        for keys in (list(SIZES), order):
            env = tiny({key: SIZES[key] for key in keys}, seed=seed, clients_per_round=2, participation_probability=0.8)
            results.append(run_one(simulated(env), dr(), 2, algorithm=Algorithm(nova(), absent=absent)))
        listed, relisted = results
        columns = [list(SIZES).index(key) for key in order]
        assert_same(relisted.model, listed.model, 1e-9)
        assert_same(relisted.weights, listed.weights[:, columns], 1e-9)
        assert torch.equal(relisted.participated, listed.participated[:, columns])

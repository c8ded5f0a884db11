"""Whole runs by every sampler: what the server learns of clients decides who is sampled next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedunfold as fu
from fedunfold.aggregation.server_round import last_reported
from fedunfold.config import Environment
from fedunfold.core import rng
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientMetrics, ClientUpdates, OpenUpdates
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import KnownClients, Selection
from fedunfold.core.run_result import RunResult
from fedunfold.io.safetensors import read_tensors
from fedunfold.rules import Rule, size
from fedunfold.rules.size import size_shares
from fedunfold.selection import Importance, Uniform
from fedunfold.server import adam
from fedunfold.training.loop import run_rounds
from tests.support.federations import RUN, BatchedRuns, run_one, simulated, tiny

SIZES = {"a": 7, "b": 4, "c": 9, "d": 6, "e": 12, "f": 5}
SAMPLERS = ["uniform", "by-size", "importance", "power-of-choice:candidates=4", "round-robin"]
STATEFUL = ["importance", "power-of-choice:candidates=4"]


def environment(sampler: str, keys: Sequence[str] = tuple(SIZES), **settings: Any) -> Environment:
    sizes = {key: SIZES[key] for key in keys}
    defaults = {"rounds": 6, "clients_per_round": 2, "participation_probability": 0.8, "seed": 4}
    return tiny(sizes, client_sampler=sampler, **defaults | settings)


def watched(env: Environment) -> list[ClientUpdates]:
    """The reports of a run with size weights, in which clients report norms and start losses whatever the sampler."""
    seen: list[ClientUpdates] = []

    def weigh(report: ClientUpdates, state: None) -> tuple[Tensor, None]:
        seen.append(report)
        return size_shares(report), None

    run_one(simulated(env), Rule("watching", weigh, frozenset({"norm", "start_loss"})), env.rounds)
    return seen


def tickets(env: Environment, t: int) -> dict[str, float]:
    names = [client.key for client in env.clients]
    return dict(zip(names, rng.uniforms(env.seed, "sampling", (RUN, t), names).tolist(), strict=True))


def names(report: ClientUpdates, chosen: Tensor) -> set[str]:
    return {name for name, here in zip(report.client_ids, chosen.tolist(), strict=True) if here}


def remember(known: dict[str, float], report: ClientUpdates, values: Tensor | None) -> None:
    assert values is not None
    here = names(report, report.participated)
    known |= {name: x for name, x in zip(report.client_ids, values.tolist(), strict=True) if name in here}


def test_power_of_choice_in_a_run() -> None:
    """The cohort of every round, worked out client by client from the losses that were reported before it."""
    env = environment("power-of-choice:candidates=4", rounds=12)
    losses: dict[str, float] = {}
    tried = False
    for t, report in enumerate(watched(env)):
        own = tickets(env, t)
        candidates = sorted(SIZES, key=lambda name: -np.log(1 - own[name]) / SIZES[name])[:4]
        ranked = sorted(candidates, key=lambda name: -losses.get(name, np.inf))
        assert names(report, report.cohort) == set(ranked[:2]), t
        tried |= all(name in losses for name in candidates)
        remember(losses, report, report.metrics.start_loss)
    assert tried, "in some round the losses alone decided"
    assert set(losses) == set(SIZES), "everybody was tried"


def test_importance_in_a_run() -> None:
    """The same from norms: clients in the order of their tickets, as long as likely, and a comb of two teeth."""
    env = environment("importance", rounds=12)
    norms: dict[str, float] = {}
    for t, report in enumerate(watched(env)):
        mean = sum(norms.values()) / len(norms) if norms else 1.0
        score = {name: norms.get(name, mean) for name in SIZES}
        pi: dict[str, float] = {}
        certain: set[str] = set()
        while not pi or max(pi.values()) > 1:
            rest = sum(score[name] for name in SIZES if name not in certain)
            pi = {name: (2 - len(certain)) * score[name] / rest for name in SIZES if name not in certain}
            certain |= {name for name in pi if pi[name] > 1}
        own, end, cohort = tickets(env, t), 0.0, set()
        tooth = sum(own.values()) % 1
        for name in sorted(own, key=lambda name: own[name]):
            end += pi.get(name, 1.0)
            if tooth < end:
                cohort.add(name)
                tooth += 1
        assert names(report, report.cohort) == cohort, t
        remember(norms, report, report.metrics.norm)
    assert len(norms) > 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_listing_clients_otherwise_samples_the_same_ones(sampler: str) -> None:
    one, other = (watched(environment(sampler, keys)) for keys in ("abcdef", "fcbeda"))
    for here, there in zip(one, other, strict=True):
        assert names(here, here.cohort) == names(there, there.cohort)
        assert names(here, here.participated) == names(there, there.participated)
    assert len({frozenset(names(report, report.cohort)) for report in one}) > 2


class Killed(Exception):
    pass


def resumable(env: Environment, checkpoint: Path | None, killed_after: int | None = None) -> RunResult:
    def on_round(t: int, _: Sequence[Evaluation]) -> None:
        if t == killed_after:
            raise Killed

    algorithm = Algorithm(server=adam(lr=0.1), absent="remember")
    more: dict[str, Any] = {"algorithm": algorithm, "checkpoint": checkpoint, "on_round": on_round}
    return run_rounds(simulated(env), size(), env.rounds, **more)[0]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("killed_after", [0, 3])
def test_a_run_is_resumed_to_the_same_bits(tmp_path: Path, sampler: str, killed_after: int) -> None:
    env, file = environment(sampler), tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        resumable(env, file, killed_after)
    found, expected = resumable(env, file), resumable(env, None)
    assert torch.equal(found.model, expected.model)
    assert torch.equal(found.participated, expected.participated)
    assert found.scores == expected.scores
    tensors, _ = read_tensors(file, "pt")
    stored = {name for name in tensors if "reported" in name}
    assert stored == {"importance": {"0.reported-norm"}, STATEFUL[1]: {"0.reported-start_loss"}}.get(sampler, set())


@pytest.mark.parametrize("sampler", STATEFUL)
def test_runs_that_go_together_remember_each_their_own(sampler: str) -> None:
    env, algorithm = environment(sampler), Algorithm(absent="drop")
    together = run_rounds(BatchedRuns(env), size(), 5, ["trial-0", "trial-1"], algorithm=algorithm)
    for run, found in zip(("trial-0", "trial-1"), together, strict=True):
        alone = run_one(simulated(env), size(), 5, run=run, algorithm=algorithm)
        assert torch.equal(found.participated, alone.participated)
        torch.testing.assert_close(found.model, alone.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_learned_weights_and_the_pre_trained_rule(sampler: str) -> None:
    env = fu.environment("digits-label-skew").replace(rounds=4, clients_per_round=3, client_sampler=sampler)
    learned = fu.learn_weights(env, learning=fu.Learning(iterations=2, adjoint="exact"))
    assert torch.isfinite(learned.losses).all()
    assert float((learned.weights - learned.history[0]).abs().max()) > 1e-3
    for rule in (learned, "fedunfold"):
        result = fu.run(env, rule)
        assert result.participated.sum(1).tolist() == [3] * 4
        assert result.scores[-1] > 0.15, "better than a guess"


# --- what is remembered ------------------------------------------------------------------------------------


def report_of(norm: list[float], participated: list[bool], sampler: Importance | Uniform) -> ClientUpdates:
    ids = ("ann", "bob", "cleo")
    return ClientUpdates(
        round=1,
        client_ids=ids,
        num_examples=torch.ones(3),
        participated=torch.tensor(participated),
        num_steps=torch.ones(3),
        updates=OpenUpdates(torch.nonzero(torch.tensor(participated)).flatten(), torch.ones(sum(participated), 2)),
        selection=Selection(sampler, KnownClients(1, ids, np.ones(3)), 2),
        metrics=ClientMetrics(norm=torch.tensor(norm)),
    )


def test_the_last_numbers_of_those_who_participated() -> None:
    first = last_reported({}, report_of([2.0, 3.0, 4.0], [True, False, True], Importance()))
    assert first["norm"][[0, 2]].tolist() == [2.0, 4.0]
    assert first["norm"].isnan().tolist() == [False, True, False]
    second = last_reported(first, report_of([5.0, 6.0, float("nan")], [False, True, True], Importance()))
    assert second["norm"].tolist() == [2.0, 6.0, 4.0]
    assert first["norm"].isnan().any(), "the state before stays as it is"


def test_a_rejected_client_tells_nothing() -> None:
    report = report_of([2.0, 3.0, 4.0], [True, True, True], Importance())
    rejected = report.accept(torch.tensor([True, False, True]))
    assert last_reported({}, rejected)["norm"].isnan().tolist() == [False, True, False]


def test_samplers_that_read_nothing_cost_nothing() -> None:
    assert last_reported({}, report_of([2.0, 3.0, 4.0], [True] * 3, Uniform())) == {}
    federation = simulated(environment("by-size"))
    (report,) = federation.train([Algorithm().request(RUN, 0, federation.initial_model(RUN))])
    assert report.metrics == ClientMetrics()


def test_wrong_samplers_are_refused_with_the_environment() -> None:
    with pytest.raises(InputError, match="unknown client sampler 'by-sizes'; did you mean 'by-size'"):
        environment("by-sizes")
    with pytest.raises(InputError, match="cannot read 'candidate=3'; it takes candidates"):
        environment("power-of-choice:candidate=3")
    with pytest.raises(InputError, match="has 1 candidates for a cohort of 2; give it at least 2"):
        run_one(simulated(environment("power-of-choice:candidates=1")), size(), 1)

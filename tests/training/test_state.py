"""A run that was stopped is resumed from its checkpoint and ends as if nothing had happened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import RoundDecision
from fedunfold.core.run_result import RunResult
from fedunfold.local import momentum, nova
from fedunfold.rules import Rule, afl, dr, fedadp, fedawa, fedfa, online_hypergradient, rule, size
from fedunfold.rules.size import size_shares
from fedunfold.server import adam
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny

ENV = tiny(participation_probability=0.6, seed=3)
REMEMBERING = Algorithm(nova(), server=adam(lr=0.1), absent="remember")


class Killed(Exception):
    pass


def run(
    checkpoint: Path | None,
    rule: Rule,
    rounds: int = 3,
    *,
    algorithm: Algorithm = REMEMBERING,
    killed_after: int | None = None,
) -> RunResult:
    def on_round(t: int, _: Sequence[Evaluation]) -> None:
        if t == killed_after:
            raise Killed

    (result,) = run_rounds(simulated(ENV), rule, rounds, algorithm=algorithm, checkpoint=checkpoint, on_round=on_round)
    return result


def assert_equal(found: RunResult, expected: RunResult) -> None:
    assert torch.equal(found.model, expected.model)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.participated, expected.participated)
    assert found.scores == expected.scores
    for ours, theirs in zip(found.evaluations, expected.evaluations, strict=True):
        assert torch.equal(ours.class_accuracy, theirs.class_accuracy)


@pytest.mark.parametrize("rule", [size(), dr(q=1), fedadp(), fedfa()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("killed_after", [0, 1])
def test_it_is_resumed_to_the_same_end(tmp_path: Path, rule: Rule, killed_after: int) -> None:
    file = tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        run(file, rule, killed_after=killed_after)
    seen: list[int] = []
    (found,) = run_rounds(
        simulated(ENV), rule, 3, algorithm=REMEMBERING, checkpoint=file, on_round=lambda t, _: seen.append(t)
    )
    assert seen == list(range(killed_after + 1, 3)), "rounds that were done are not done again"
    expected = run(None, rule)
    assert_equal(found, expected)
    assert torch.equal(run(file, rule).model, expected.model), "one that had ended is only read"
    with pytest.raises(InputError, match="has made 3 rounds already, more than the 2 requested"):
        run(file, rule, rounds=2)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    run(file, size())
    with pytest.raises(InputError, match="is of another run"):
        run(file, dr(q=1))
    with pytest.raises(InputError, match="is of another run"):
        run_rounds(simulated(ENV.replace(seed=4)), size(), 3, algorithm=REMEMBERING, checkpoint=file)
    with pytest.raises(InputError, match="is of another run"):
        run_rounds(simulated(ENV.replace(lr=0.7)), size(), 3, algorithm=REMEMBERING, checkpoint=file)
    with pytest.raises(InputError, match="is of another run"):
        run_rounds(simulated(ENV), size(), 3, algorithm=REMEMBERING, checkpoint=file, digest="other data")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, before = tmp_path / "run.safetensors", tmp_path / "run-before.safetensors"
    whole = run(file, size())
    file.write_bytes(file.read_bytes()[:-40])
    assert torch.equal(run(file, size()).model, whole.model)
    (message,) = caplog.messages
    assert message.startswith(f"checkpoint {file} is damaged; ")
    assert message.endswith(f" from the one before it, {before.name}.")
    for damaged in (file, before):
        damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"run\.safetensors and .*run-before\.safetensors is damaged; delete it"):
        run(file, size())


# --- what a rule remembers ---------------------------------------------------------------------------------


@rule("accuracy")
def patient(report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
    """Weights by a running mean of how badly clients fare: its state is a tensor."""
    now = 1 - report.metric("accuracy").nan_to_num(0.5)
    mean = now if state is None else 0.8 * state + 0.2 * now
    return (mean + 1e-3) / (mean + 1e-3).sum(), mean


@rule()
def nested(report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
    """Tensors of several types inside lists and dicts, beside plain values."""
    rounds = 1 if state is None else state["rounds"] + 1
    shares = size_shares(report)
    if state is not None:
        norms, (sums, marks) = state["norms"], state["more"][0]
        assert norms.dtype == torch.float32
        assert sums.dtype == torch.float64
        assert marks.dtype == torch.bool
        assert state["more"][1:] == ["b", None, 1.5, True]
        shares = shares * (1 + float(norms.sum()) + sums)
    more = [(rounds * shares, report.participated), "b", None, 1.5, True]
    return shares / shares.sum(), {"rounds": rounds, "norms": torch.ones(2, dtype=torch.float32) / rounds, "more": more}


@rule()
def deciding(report: ClientUpdates, state: Any) -> tuple[RoundDecision, Any]:
    """A step and a momentum that depend on what is remembered."""
    rounds = 0 if state is None else state
    return RoundDecision(size_shares(report), 1 + 0.5 * rounds, 0.3 * min(rounds, 2)), rounds + 1


STATEFUL = [patient, nested, deciding, fedadp(), fedfa(), afl(), fedawa(lr=0.2), online_hypergradient(step_size=0.3)]


@pytest.mark.parametrize("rule", STATEFUL, ids=lambda rule: rule.name)
@pytest.mark.parametrize("killed_after", [0, 1])
def test_a_rules_state_is_resumed_byte_for_byte(tmp_path: Path, rule: Rule, killed_after: int) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "run.safetensors"
    expected = run(whole, rule)
    with pytest.raises(Killed):
        run(file, rule, killed_after=killed_after)
    assert_equal(run(file, rule), expected)
    assert file.read_bytes() == whole.read_bytes()


def test_a_state_that_holds_a_tensor_twice_is_resumed(tmp_path: Path) -> None:
    @rule()
    def holding(report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
        weights = size_shares(report)
        if state is not None:
            assert torch.equal(state["now"], weights) and torch.equal(state["first"], weights)
        return weights, {"now": weights, "first": weights}

    file = tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        run(file, holding, killed_after=0)
    assert_equal(run(file, holding), run(None, holding))


def test_a_momentum_decided_on_is_resumed(tmp_path: Path) -> None:
    """On a plain server, where the direction of the round before is all the state there is."""
    file = tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        run(file, deciding, algorithm=Algorithm(momentum()), killed_after=1)
    expected = run(None, deciding, algorithm=Algorithm(momentum()))
    assert_equal(run(file, deciding, algorithm=Algorithm(momentum())), expected)
    assert not torch.equal(expected.model, run(None, size(), algorithm=Algorithm(momentum())).model)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (object(), "not of object"),
        ({"seen": {1, 2}}, "not of set"),
        ([np.float64(1.0), np.arange(2)], "not of ndarray"),
        ({"a": {3: 1.0}}, "strings as keys"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_by_its_type(tmp_path: Path, state: Any, message: str) -> None:
    odd = Rule("odd", lambda report, _: (size_shares(report), state))
    with pytest.raises(InputError, match=f"the state of a rule or a clock is saved only .*{message}"):
        run(tmp_path / "run.safetensors", odd)
    assert not list(tmp_path.iterdir())
    run(None, odd)


def test_an_early_stopped_run_is_resumed(tmp_path: Path) -> None:
    """Its last round is saved, however seldom checkpoints are."""
    file = tmp_path / "run.safetensors"
    (early,) = run_rounds(
        simulated(ENV),
        patient,
        3,
        algorithm=REMEMBERING,
        checkpoint=file,
        checkpoint_seconds=3600,
        on_round=lambda t, _: t == 1,
    )
    assert len(early.evaluations) == 2
    seen: list[int] = []
    (found,) = run_rounds(
        simulated(ENV), patient, 3, algorithm=REMEMBERING, checkpoint=file, on_round=lambda t, _: seen.append(t)
    )
    assert seen == [2]
    assert_equal(found, run(None, patient))


def test_norms_and_who_was_rejected_are_saved(tmp_path: Path) -> None:
    """Three of six are sampled for a round, and judged by the rounds before, which a resumed run has to know."""
    env = tiny(dict.fromkeys("abcdef", 9), epochs=1, clients_per_round=3, seed=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300
    file, algorithm = tmp_path / "run.safetensors", Algorithm(filter="norm", absent="drop")
    for rounds in (1, 2, 6):
        (found,) = run_rounds(simulated(env), size(), rounds, algorithm=algorithm, checkpoint=file)
    (expected,) = run_rounds(simulated(env), size(), 6, algorithm=algorithm)
    assert {entry.client for entry in expected.rejected} == {"f"}
    assert found.rejected == expected.rejected
    assert found.warnings == expected.warnings
    assert torch.equal(found.model, expected.model)

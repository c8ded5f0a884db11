"""A run that was stopped goes on from its checkpoint and ends as if nothing had happened."""

from pathlib import Path

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.core.federation import Evaluation
from fedunfold.local.optimizers import nova
from fedunfold.rules import Rule, dr, fedadp, fedfa, size
from fedunfold.server.optimizers import adam
from fedunfold.training.loop import Algorithm, RunResult, run_rounds
from tests.support.federations import simulated, tiny

ENV = tiny(participation_probability=0.6, seed=3)
REMEMBERING = Algorithm(nova(), server=adam(lr=0.1), absent="remember")


class Killed(Exception):
    pass


def run(checkpoint: Path | None, rule: Rule, rounds: int = 3, *, killed_after: int | None = None) -> RunResult:
    def on_round(t: int, _: Evaluation) -> None:
        if t == killed_after:
            raise Killed

    return run_rounds(simulated(ENV), rule, rounds, algorithm=REMEMBERING, checkpoint=checkpoint, on_round=on_round)


@pytest.mark.parametrize("rule", [size(), dr(q=1), fedadp(), fedfa()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("killed_after", [0, 1])
def test_it_goes_on_to_the_same_end(tmp_path: Path, rule: Rule, killed_after: int) -> None:
    file = tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        run(file, rule, killed_after=killed_after)
    heard: list[int] = []
    found = run_rounds(
        simulated(ENV), rule, 3, algorithm=REMEMBERING, checkpoint=file, on_round=lambda t, _: heard.append(t)
    )
    assert heard == list(range(killed_after + 1, 3)), "rounds that were done are not done again"
    expected = run(None, rule)
    assert torch.equal(found.model, expected.model)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.present, expected.present)
    assert found.accuracies == expected.accuracies
    for ours, theirs in zip(found.evaluations, expected.evaluations, strict=True):
        assert torch.equal(ours.class_accuracy, theirs.class_accuracy)
    assert torch.equal(run(file, rule).model, expected.model), "one that had ended is only read"
    with pytest.raises(InputError, match="has made 3 rounds already, more than the 2 asked for"):
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
    assert caplog.messages == [f"checkpoint {file} is damaged; going on from the one before it, {before.name}."]
    for damaged in (file, before):
        damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"run\.safetensors and .*run-before\.safetensors is damaged; delete it"):
        run(file, size())


def test_a_rule_that_remembers_something_else_cannot_be_kept(tmp_path: Path) -> None:
    odd = Rule("odd", lambda report, state: (size()(report, None)[0], object()))
    with pytest.raises(InputError, match="a rule's state is kept only"):
        run(tmp_path / "run.safetensors", odd)


def test_lengths_and_who_was_set_aside_are_kept(tmp_path: Path) -> None:
    """Three of six are there in a round, and judged by the rounds before, which a run that goes on has to know."""
    env = tiny(dict.fromkeys("abcdef", 9), epochs=1, clients_per_round=3, seed=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300
    file, algorithm = tmp_path / "run.safetensors", Algorithm(screen="norm", absent="drop")
    for rounds in (1, 2, 6):
        found = run_rounds(simulated(env), size(), rounds, algorithm=algorithm, checkpoint=file)
    expected = run_rounds(simulated(env), size(), 6, algorithm=algorithm)
    assert {entry.client for entry in expected.rejected} == {"f"}
    assert found.rejected == expected.rejected
    assert found.warnings == expected.warnings
    assert torch.equal(found.model, expected.model)

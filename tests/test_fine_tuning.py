"""A pre-trained rule adapted to one federation, or left as it is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedunfold as fu
from fedunfold import fine_tuning
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.data.config import MemorySource
from fedunfold.data.partitions import GivenPartition
from fedunfold.fine_tuning import FineTuned
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule_file import save_rule
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.rule_gradient import rule_gradient
from tests.support.federations import tiny
from tests.support.rules import small_rule

ENV = fu.environment("digits-label-skew").replace(rounds=5)


def bytes_of(rule: ParametricRule, folder: Path) -> bytes:
    save_rule(rule, folder / "rule.safetensors")
    return (folder / "rule.safetensors").read_bytes()


@pytest.fixture(scope="module")
def tuned() -> FineTuned:
    return fu.fine_tune(ENV)


def test_the_validation_loss_falls(tuned: FineTuned) -> None:
    assert tuned.kept and len(tuned.losses) == 4
    assert tuned.losses[tuned.step] == min(tuned.losses) < tuned.losses[0]
    assert tuned.runs == 4 + 3 * 2


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_a_step_lowers_the_loss_that_it_is_made_by(adjoint: Any) -> None:
    rule = small_rule()
    tuned = fu.fine_tune(ENV, rule, steps=1, adjoint=adjoint)
    assert tuned.runs == (4 if adjoint == "exact" else 3)
    federation = fu.SimulatedFederation(ENV, ENV.load().held_out(0.2, ENV.seed))

    def loss(of: ParametricRule) -> float:
        assert of.algorithm is not None
        given = federation, of.with_horizon(ENV.rounds), ENV.rounds, of.algorithm
        return rule_gradient(*given, OUTER_LOSSES.make("every-round"), "first_order", "fine-tune-0").loss

    assert loss(tuned.rule) < loss(rule)


def test_no_parameter_moves_far(tuned: FineTuned) -> None:
    before = fu.pretrained().params
    moved = max(float((value - before[name]).abs().max()) for name, value in tuned.rule.params.items())
    assert 0.003 < moved < 1.5 * tuned.step * 0.003


def test_the_rule_is_used_as_any_other(tuned: FineTuned, tmp_path: Path) -> None:
    before = fu.pretrained()
    assert (tuned.rule.name, tuned.rule.algorithm, tuned.rule.horizon) == ("open@1-tuned", before.algorithm, None)
    assert "digits-label-skew" in tuned.rule.description
    save_rule(tuned.rule, tmp_path / "rule.safetensors")
    again = fu.pretrained(tmp_path / "rule.safetensors")
    assert all(torch.equal(again.params[name], value) for name, value in tuned.rule.params.items())
    one, other = (fu.run(ENV, rule) for rule in (tuned.rule, again))
    assert torch.equal(one.model, other.model)
    assert fu.fine_tune(ENV, again, steps=1).rule.name == "open@1-tuned"


def test_what_makes_it_worse_is_undone(tmp_path: Path) -> None:
    before = fu.pretrained()
    tuned = fu.fine_tune(ENV, before, steps=2, lr=0.9)
    assert not tuned.kept and min(tuned.losses[1:]) > tuned.losses[0]
    assert bytes_of(tuned.rule, tmp_path) == bytes_of(before, tmp_path)
    assert tuned.verdict.startswith("open@1 stays as it is: none of 2 steps lowered its validation loss of ")


def test_the_best_step_is_kept_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 1.0, 1.0, 2.5])
    monkeypatch.setattr(fine_tuning._Tuning, "_validated", lambda *_: next(losses))
    tuned = fu.fine_tune(tiny(), small_rule(), steps=4)
    assert (tuned.step, tuned.losses) == (2, (3.0, 2.0, 1.0, 1.0, 2.5))


def test_the_same_bytes_again(tuned: FineTuned, tmp_path: Path) -> None:
    again = fu.fine_tune(ENV)
    assert again.losses == tuned.losses
    assert bytes_of(again.rule, tmp_path) == bytes_of(tuned.rule, tmp_path)
    other = fu.fine_tune(ENV.replace(seed=1))
    assert bytes_of(other.rule, tmp_path) != bytes_of(tuned.rule, tmp_path)


def test_the_test_set_makes_no_difference(tuned: FineTuned) -> None:
    data = ENV.load()
    spoiled = replace(data, y_test=(data.y_test + 1) % 10)
    found = fu.fine_tune(ENV.replace(data=MemorySource(data=spoiled), partition=GivenPartition()))
    assert found.losses == tuned.losses


class Interrupted(fu.Callback):
    """Ctrl-C after a step."""

    def __init__(self, after: int | None = None) -> None:
        self.heard: list[tuple[int, int, float]] = []
        self._after = after

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def on_fine_tuning_step(self, step: int, steps: int, loss: float) -> None:
        self.heard.append((step, steps, loss))
        if step == self._after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 2, 3])
def test_what_was_interrupted_is_resumed(tuned: FineTuned, tmp_path: Path, after: int) -> None:
    file, callback = tmp_path / "checkpoint.safetensors", Interrupted()
    with pytest.raises(KeyboardInterrupt):
        fu.fine_tune(ENV, checkpoint=file, callback=Interrupted(after))
    resumed = fu.fine_tune(ENV, checkpoint=file, callback=callback)
    assert (resumed.losses, resumed.runs) == (tuned.losses, tuned.runs)
    assert bytes_of(resumed.rule, tmp_path) == bytes_of(tuned.rule, tmp_path)
    assert callback.heard == [(m, 3, tuned.losses[m]) for m in range(after, 4)]
    assert (callback.settings["command"], callback.settings["rule"]) == ("fine-tune", "open@1")
    with pytest.raises(fu.InputError, match=r"of another fine-tuning \(lr was 0.003 and is 0.001\)"):
        fu.fine_tune(ENV, lr=0.001, checkpoint=file)


def test_training_that_diverges_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def diverging(*given: Any, **more: Any) -> Any:
        calls.append(given)
        if len(calls) > 1:
            raise fu.DivergenceError("round 1: too far.")
        return run_rounds(*given, **more)

    monkeypatch.setattr(fine_tuning, "run_rounds", diverging)
    before = small_rule()
    tuned = fu.fine_tune(tiny(), before, steps=2)
    assert tuned.losses[1:] == (float("inf"),) * 2
    assert tuned.rule is before


def test_without_a_finite_gradient_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(*_: Any) -> Any:
        raise fu.DivergenceError("round 1: too steep.")

    monkeypatch.setattr(fine_tuning, "rule_gradient", diverging)
    tuned = fu.fine_tune(tiny(), small_rule())
    assert (tuned.kept, len(tuned.losses), tuned.runs) == (False, 1, 3)
    assert repr(tuned).startswith("small@1 stays as it is: no step could be made from its validation loss of ")


def test_where_nobody_ever_participates_the_rule_stays() -> None:
    assert not fu.fine_tune(tiny(participation_probability=0.0), small_rule()).kept


def test_a_rule_that_diverges_by_itself_is_an_error() -> None:
    with pytest.raises(fu.DivergenceError, match="round 0"):
        fu.fine_tune(tiny(lr=1e38), small_rule())


def test_another_algorithm_comes_with_the_rule() -> None:
    algorithm = fu.Algorithm(fu.momentum(0.5), absent="drop")
    tuned = fu.fine_tune(ENV, algorithm=algorithm, steps=1)
    assert tuned.rule.algorithm == algorithm


def test_a_formula_is_fine_tuned_too() -> None:
    tuned = fu.fine_tune(ENV, fu.unfolded_formula(), steps=1, lr=0.05)
    assert tuned.kept and tuned.rule.name == "fedunfold-formula-tuned"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"steps": 0}, "at least 1, not 0"),
    "half a step": ({"steps": 1.5}, "at least 1, not 1.5"),
    "too long a step": ({"lr": 1}, "between 0 and 1, not 1"),
    "an adjoint": ({"adjoint": "second"}, "first_order, exact, not 'second'"),
    "all rows": ({"validation": 1.0}, r"held out must lie in \(0, 1\), not 1.0"),
    "no rule": ({"rule": fu.size()}, "a pre-trained rule, its name or its file, not "),
    "an unknown rule": ({"rule": "closed@1"}, "no pre-trained rule 'closed@1'"),
    "a robust aggregator": ({"algorithm": fu.Algorithm(aggregator=fu.median())}, "aggregator 'median'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_get_one_sentence(what: str) -> None:
    given, said = WRONG[what]
    with pytest.raises(fu.InputError, match=said) as refused:
        fu.fine_tune(tiny(), **{"rule": small_rule(), **given})
    assert "\n" not in str(refused.value) and "--" not in str(refused.value)

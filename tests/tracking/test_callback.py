"""One protocol: what is told, in which order, and what a tracker that fails does to the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedunfold as fu
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import CallbackList
from tests.support.federations import tiny

QUICK = fu.Learning(iterations=2)
OF_RUNS = ("on_start", "on_outer_step", "on_round_end", "on_trial_end", "on_results", "on_end", "on_artifacts")
EVENTS = (*OF_RUNS, "on_pretraining_step", "on_fine_tuning_step")


class Recorder(fu.Callback):
    """Writes down all it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self.heard.append(("on_start", settings))

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self.heard.append(("on_outer_step", method, len(so_far.losses), iterations))

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
        self.heard.append(("on_round_end", method, trial, round_index, evaluation.score))

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self.heard.append(("on_trial_end", method, trial, trials, result))

    def on_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.heard.append(("on_results", rows))

    def on_end(self, failure: BaseException | None) -> None:
        self.heard.append(("on_end", failure))

    def on_artifacts(self, files: Sequence[Path]) -> None:
        self.heard.append(("on_artifacts", files))

    @property
    def order(self) -> list[str]:
        return [event[0] for event in self.heard]


def test_learning_is_told() -> None:
    recorder = Recorder()
    learned = fu.learn_weights(tiny(), learning=QUICK, callback=recorder)
    assert recorder.order == ["on_start", "on_outer_step", "on_outer_step", "on_results", "on_end"]
    settings = recorder.heard[0][1]
    assert (settings["command"], settings["environment"], settings["rounds"]) == ("learn", tiny().name, 3)
    assert settings["learning"]["iterations"] == 2
    assert recorder.heard[1:3] == [("on_outer_step", "learned", 1, 2), ("on_outer_step", "learned", 2, 2)]
    row = {"method": "learned", "iteration": 1, "outer_loss": learned.losses[-1]}
    assert recorder.heard[3] == ("on_results", [row])
    assert recorder.heard[4] == ("on_end", None)


def test_a_run_is_told() -> None:
    recorder = Recorder()
    result = fu.run(tiny(), "fednova", trial=4, callback=recorder)
    assert recorder.order == ["on_start", *["on_round_end"] * 3, "on_trial_end", "on_results", "on_end"]
    rounds = [("on_round_end", "fednova", 4, t, accuracy) for t, accuracy in enumerate(result.scores)]
    assert recorder.heard[1:4] == rounds
    assert recorder.heard[4][-1] is result
    assert recorder.heard[5][1][0]["accuracy"] == 100 * result.scores[-1]


def test_a_comparison_is_told_method_by_method() -> None:
    recorder = Recorder()
    compared = fu.compare(tiny(), ["fedavg", "duw-fedavg"], trials=2, learning=QUICK, callback=recorder)
    trial, steps = ["on_round_end", "on_round_end", "on_round_end", "on_trial_end"], ["on_outer_step"] * 2
    assert recorder.order == ["on_start", *trial, *trial, *steps, *trial, *trial, "on_results", "on_end"]
    assert {event[1] for event in recorder.heard if event[0] == "on_outer_step"} == {"duw-fedavg"}
    assert recorder.heard[0][1]["methods"] == ["fedavg", "duw-fedavg"]
    told = [event[4] for event in recorder.heard if event[0] == "on_trial_end"]
    assert told == [trial for method in compared.methods for trial in method.trials]
    (rows,) = (event[1] for event in recorder.heard if event[0] == "on_results")
    assert [(row["method"], row["accuracy_mean"]) for row in rows] == [(m.name, m.mean) for m in compared.methods]


def test_a_refused_run_began_nothing() -> None:
    recorder = Recorder()
    with pytest.raises(fu.InputError):
        fu.compare(tiny(), ["fedavg"], trials=0, callback=recorder)
    assert recorder.heard == []


def test_a_failure_is_told_and_goes_on_its_way() -> None:
    @fu.rule("loss")
    def broken(report: fu.ClientUpdates, state: Any) -> Any:
        raise RuntimeError("no weights today")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="today"):
        fu.run(tiny(), broken, callback=recorder)
    assert recorder.order == ["on_start", "on_end"]
    assert isinstance(recorder.heard[-1][1], RuntimeError)


class Failing(Recorder):
    """Fails at one kind of event."""

    def __init__(self, event: str) -> None:
        super().__init__()

        def fail(*_: object) -> None:
            self.heard.append((event,))
            raise OSError("the disk\nis full")

        setattr(self, event, fail)


@pytest.mark.parametrize("event", OF_RUNS[:-1])
def test_a_failing_tracker_does_not_end_the_run(event: str) -> None:
    failing, sound, said = Failing(event), Recorder(), list[str]()
    callbacks = CallbackList(failing, sound, log=said.append)
    compared = fu.compare(tiny(), ["duw-fedavg"], trials=2, learning=QUICK, callback=callbacks)
    assert said == ["Failing failed (OSError: the disk is full); the run continues without it."]
    assert failing.order[-1] == event and failing.order.count(event) == 1
    assert sound.order[-1] == "on_end" and sound.order.count("on_round_end") == 6
    expected = fu.compare(tiny(), ["duw-fedavg"], trials=2, learning=QUICK).methods[0].trials[1]
    assert torch.equal(compared.methods[0].trials[1].model, expected.model)


def test_from_python_a_failing_tracker_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="Failing failed"):
        fu.run(tiny(), callback=Failing("on_round_end"))


def test_ctrl_c_in_a_tracker_ends_the_run() -> None:
    class Stopping(fu.Callback):
        def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
            raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        fu.run(tiny(), callback=CallbackList(Stopping(), recorder))
    assert isinstance(recorder.heard[-1][1], KeyboardInterrupt)


def test_every_event_is_passed_on() -> None:
    """A method added to the protocol and forgotten in the fan-out would be silent."""
    events = {name for name in vars(fu.Callback) if not name.startswith("_")}
    assert events == set(EVENTS) <= set(vars(CallbackList))

"""One protocol: what is told, in which order, and what a tracker that fails does to the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedunfold as fu
from fedunfold.core.messages import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import CallbackList
from tests.support.federations import tiny

QUICK = fu.Learning(iterations=2)
EVENTS = ("began", "learning", "round", "trial", "table", "ended", "kept")


class Recorder(fu.Callback):
    """Writes down all it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def began(self, settings: Mapping[str, Any]) -> None:
        self.heard.append(("began", settings))

    def learning(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self.heard.append(("learning", method, len(so_far.losses), iterations))

    def round(self, method: str, trial: int, round: int, seen: Evaluation) -> None:
        self.heard.append(("round", method, trial, round, seen.accuracy))

    def trial(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self.heard.append(("trial", method, trial, trials, result))

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.heard.append(("table", rows))

    def ended(self, failure: BaseException | None) -> None:
        self.heard.append(("ended", failure))

    def kept(self, files: Sequence[Path]) -> None:
        self.heard.append(("kept", files))

    @property
    def order(self) -> list[str]:
        return [event[0] for event in self.heard]


def test_learning_is_told() -> None:
    recorder = Recorder()
    learned = fu.learn_weights(tiny(), learning=QUICK, tracker=recorder)
    assert recorder.order == ["began", "learning", "learning", "table", "ended"]
    settings = recorder.heard[0][1]
    assert (settings["command"], settings["environment"], settings["rounds"]) == ("learn", tiny().name, 3)
    assert settings["learning"]["iterations"] == 2
    assert recorder.heard[1:3] == [("learning", "learned", 1, 2), ("learning", "learned", 2, 2)]
    assert recorder.heard[3] == ("table", [{"method": "learned", "iteration": 1, "outer_loss": learned.losses[-1]}])
    assert recorder.heard[4] == ("ended", None)


def test_a_run_is_told() -> None:
    recorder = Recorder()
    result = fu.run(tiny(), "fednova", trial=4, tracker=recorder)
    assert recorder.order == ["began", "round", "round", "round", "trial", "table", "ended"]
    assert recorder.heard[1:4] == [("round", "fednova", 4, t, accuracy) for t, accuracy in enumerate(result.accuracies)]
    assert recorder.heard[4][-1] is result
    assert recorder.heard[5][1][0]["accuracy"] == 100 * result.accuracies[-1]


def test_a_comparison_is_told_method_by_method() -> None:
    recorder = Recorder()
    compared = fu.compare(tiny(), ["fedavg", "duw-fedavg"], trials=2, learning=QUICK, tracker=recorder)
    trial = ["round", "round", "round", "trial"]
    assert recorder.order == ["began", *trial, *trial, "learning", "learning", *trial, *trial, "table", "ended"]
    assert {event[1] for event in recorder.heard if event[0] == "learning"} == {"duw-fedavg"}
    assert recorder.heard[0][1]["methods"] == ["fedavg", "duw-fedavg"]
    told = [event[4] for event in recorder.heard if event[0] == "trial"]
    assert told == [trial for method in compared.methods for trial in method.trials]
    (rows,) = (event[1] for event in recorder.heard if event[0] == "table")
    assert [(row["method"], row["accuracy_mean"]) for row in rows] == [(m.name, m.mean) for m in compared.methods]


def test_a_refused_run_began_nothing() -> None:
    recorder = Recorder()
    with pytest.raises(fu.InputError):
        fu.compare(tiny(), ["fedavg"], trials=0, tracker=recorder)
    assert recorder.heard == []


def test_a_failure_is_told_and_goes_on_its_way() -> None:
    @fu.rule("loss")
    def broken(report: fu.ClientUpdates, state: Any) -> Any:
        raise RuntimeError("no weights today")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="today"):
        fu.run(tiny(), broken, tracker=recorder)
    assert recorder.order == ["began", "ended"]
    assert isinstance(recorder.heard[-1][1], RuntimeError)


class Failing(Recorder):
    """Fails at one kind of event."""

    def __init__(self, event: str) -> None:
        super().__init__()

        def fail(*_: object) -> None:
            self.heard.append((event,))
            raise OSError("the disk\nis full")

        setattr(self, event, fail)


@pytest.mark.parametrize("event", EVENTS[:-1])
def test_a_failing_tracker_does_not_end_the_run(event: str) -> None:
    failing, sound, said = Failing(event), Recorder(), list[str]()
    tracker = CallbackList(failing, sound, say=said.append)
    compared = fu.compare(tiny(), ["duw-fedavg"], trials=2, learning=QUICK, tracker=tracker)
    assert said == ["Failing failed (OSError: the disk is full); the run goes on without it."]
    assert failing.order[-1] == event and failing.order.count(event) == 1
    assert sound.order[-1] == "ended" and sound.order.count("round") == 6
    expected = fu.compare(tiny(), ["duw-fedavg"], trials=2, learning=QUICK).methods[0].trials[1]
    assert torch.equal(compared.methods[0].trials[1].model, expected.model)


def test_from_python_a_failing_tracker_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="Failing failed"):
        fu.run(tiny(), tracker=Failing("round"))


def test_ctrl_c_in_a_tracker_ends_the_run() -> None:
    class Stopping(fu.Callback):
        def round(self, method: str, trial: int, round: int, seen: Evaluation) -> None:
            raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        fu.run(tiny(), tracker=CallbackList(Stopping(), recorder))
    assert isinstance(recorder.heard[-1][1], KeyboardInterrupt)


def test_every_event_is_passed_on() -> None:
    """A method added to the protocol and forgotten in the fan-out would be silent."""
    events = {name for name in vars(fu.Callback) if not name.startswith("_")}
    assert events == set(EVENTS) <= set(vars(CallbackList))

"""Early stopping, against the callback layer: which rounds ask to stop, and that the request is passed on."""

from typing import Any

import pytest
import torch

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.task import PrimaryMetric
from fedunfold.tracking import CallbackList
from fedunfold.tracking.callback import Callback
from fedunfold.tracking.early_stopping import EarlyStopping
from tests.support.federations import tiny


def stops(stopping: Callback, losses: list[float], method: str = "fedavg", trial: int = 0) -> list[bool | None]:
    """What is returned after every round; accuracies are 1 − loss."""
    return [stopping.on_round_end(method, trial, t, Evaluation(1 - loss, loss)) for t, loss in enumerate(losses)]


def test_a_trial_stops_after_so_many_rounds_without_improvement() -> None:
    assert stops(EarlyStopping(2), [0.9, 0.8, 0.8, 0.85, 0.7]) == [False, False, False, True, False]
    assert stops(EarlyStopping(1), [0.9, 0.8, 0.7]) == [False] * 3
    assert stops(EarlyStopping(2), [0.9, 0.8, 0.8, 0.79, 0.8, 0.8]) == [False] * 5 + [True]


def test_accuracy_is_watched_the_other_way_round() -> None:
    assert stops(EarlyStopping(1, metric="score"), [0.9, 0.5, 0.6]) == [False, False, True]


def test_an_error_that_falls_improves() -> None:
    error = PrimaryMetric("rmse", greater_is_better=False, percentages=frozenset())
    stopping = EarlyStopping(1, metric="score")
    tests = [Evaluation(score, 1.0, primary=error) for score in (9.0, 8.0, 8.5)]
    assert [stopping.on_round_end("fedavg", 0, t, test) for t, test in enumerate(tests)] == [False, False, True]


def test_small_improvements_do_not_count() -> None:
    falling = [0.9, 0.85, 0.8, 0.75]
    assert stops(EarlyStopping(2, min_delta=0.2), falling) == [False, False, True, True]
    assert stops(EarlyStopping(2, min_delta=0.09), falling) == [False] * 4


def test_a_loss_that_is_no_number_is_no_improvement() -> None:
    assert stops(EarlyStopping(1), [0.9, float("nan"), 0.8]) == [False, True, False]


def test_trials_and_methods_are_counted_apart_and_runs_begin_anew() -> None:
    stopping = EarlyStopping(1)
    assert stops(stopping, [0.5, 0.6]) == [False, True]
    assert stops(stopping, [0.7, 0.6], trial=1) == [False, False]
    assert stops(stopping, [0.7, 0.6], method="dr") == [False, False]
    stopping.on_start({})
    assert stops(stopping, [0.9, 0.8]) == [False, False]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"patience": 0}, "patience"),
        ({"patience": 1.5}, "patience"),
        ({"patience": 1, "min_delta": -0.1}, "min_delta"),
        ({"patience": 1, "min_delta": float("nan")}, "min_delta"),
        ({"patience": 1, "metric": "f1"}, "metric"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"{named} must be"):
        EarlyStopping(**settings)


def test_one_callback_that_wants_to_stop_is_enough_and_all_are_called() -> None:
    called: list[int] = []

    class Counting(Callback):
        def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
            called.append(round_index)

    assert stops(CallbackList(EarlyStopping(1), Counting()), [0.5, 0.5, 0.4]) == [False, True, False]
    assert called == [0, 1, 2]
    assert stops(CallbackList(Counting()), [0.5, 0.5]) == [False, False]


class StopAfter(Callback):
    """Wants every trial to stop after a round, and learning after an outer iteration."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_outer_step(self, method: str, so_far: Any, iterations: int) -> bool:
        return len(so_far.losses) > self.last

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> bool:
        return round_index + trial >= self.last


def test_a_run_that_is_stopped_has_the_rounds_until_then() -> None:
    whole, stopped = fu.run(tiny()), fu.run(tiny(), callback=StopAfter(1))
    assert len(whole.evaluations) == 3
    assert stopped.scores == whole.scores[:2]
    assert torch.equal(stopped.weights, whole.weights[:2])


def test_weights_that_are_stopped_have_the_iterations_until_then() -> None:
    learning = fu.Learning(iterations=4)
    whole = fu.learn_weights(tiny(), learning=learning)
    stopped = fu.learn_weights(tiny(), learning=learning, callback=StopAfter(1))
    assert torch.equal(stopped.losses, whole.losses[:2])
    assert torch.equal(stopped.weights, whole.history[2])


def test_trials_of_a_comparison_stop_each_at_its_own_round() -> None:
    (method,) = fu.compare(tiny(), ["fedavg"], trials=2, callback=StopAfter(1)).methods
    assert [len(trial.evaluations) for trial in method.trials] == [2, 1]
    assert len(method.rounds) == 2


def test_learning_inside_a_comparison_can_be_stopped() -> None:
    started: list[str] = []

    class Impatient(Callback):
        def on_start(self, settings: Any) -> None:
            started.append(settings["command"])

        def on_outer_step(self, method: str, so_far: Any, iterations: int) -> bool:
            return method == "duw-fedavg" and len(so_far.losses) == 2

    learning, both = fu.Learning(iterations=3), ["duw-fedavg", "fedunfold-table"]
    stopped, whole = fu.compare(tiny(), both, trials=1, learning=learning, callback=Impatient()).methods
    assert stopped.learned is not None
    assert len(stopped.learned.losses) == 2
    assert whole.learned is not None
    assert len(whole.learned.losses) == 3
    assert started == ["compare"]


def test_a_callback_that_fails_does_not_stop_training() -> None:
    class Failing(Callback):
        def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> bool:
            raise OSError("the disk is full")

    messages: list[str] = []
    assert stops(CallbackList(Failing(), log=messages.append), [0.5, 0.5]) == [False, False]
    assert messages == ["Failing failed (OSError: the disk is full); the run continues without it."]

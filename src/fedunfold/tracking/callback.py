"""The one protocol by which a run reports on itself: to the terminal, to files, to trackers, to a user's own code."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights


class Callback:
    """Called at the events of a run; does nothing by itself. Override what is of interest.

    The methods are called in the order in which they stand here, `on_artifacts` by the command line alone. Weights that
    are learned outside a comparison have the method name "learned". `on_outer_step` and `on_round_end` may return True
    to stop training early: what was learned or trained until then is the result. A callback that raises an exception is
    not called again, and the run continues without it.

    >>> import fedunfold as fu
    >>> class Printer(fu.Callback):
    ...     def on_outer_step(self, method, so_far, iterations):
    ...         print(f"{method}: outer iteration {len(so_far.losses)} of {iterations}")
    >>> learned = fu.learn_weights("digits-label-skew", learning=fu.Learning(iterations=2), callback=Printer())
    learned: outer iteration 1 of 2
    learned: outer iteration 2 of 2
    """

    def on_start(self, settings: Mapping[str, Any]) -> None:
        """The work begins.

        Args:
            settings: What is computed, as plain values, maps and lists.
        """

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> bool | None:
        """An outer iteration ended.

        Args:
            method: The method whose weights are learned.
            so_far: What is learned until now.
            iterations: How many outer iterations there are in all.

        Returns:
            True to stop learning here.
        """

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> bool | None:
        """A round of a trial ended. Trials on a GPU go through each round together.

        Args:
            method: The method's name.
            trial: The trial's number, from 0.
            round_index: The round's number t, from 0.
            evaluation: The test of w^(t+1).

        Returns:
            True to stop the trial here; trials that are trained together stop when every one of them is to.
        """

    def on_pretraining_step(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """A step of a rule's pre-training ended.

        Args:
            step: How many there were.
            steps: How many there are at most.
            values: The loss, and what a validation after this step measured, by name.
        """

    def on_fine_tuning_step(self, step: int, steps: int, loss: float) -> None:
        """A rule was validated while it is fine-tuned.

        Args:
            step: After how many steps, from 0.
            steps: How many there are at most.
            loss: The validation loss.
        """

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        """A trial ended.

        Args:
            method: The method's name.
            trial: The trial's number, from 0.
            trials: How many there are in all.
            result: What came out.
        """

    def on_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """All results are known.

        Args:
            rows: A row for each method; fractions in percent.
        """

    def on_end(self, failure: BaseException | None) -> None:
        """The work is over.

        Args:
            failure: What ended it before its time (KeyboardInterrupt: Ctrl-C).
        """

    def on_artifacts(self, files: Sequence[Path]) -> None:
        """The run's files have been written.

        Args:
            files: All of them.
        """


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


class CallbackList(Callback):
    """Several callbacks in turn; training stops where one of them wants it to.

    One that raises an exception is reported once and not called again: hours of training are worth more than their
    record elsewhere.

    Args:
        callbacks: Those to be called, in this order.
        log: What reports a failure in one line; a RuntimeWarning by default.
    """

    def __init__(self, *callbacks: Callback, log: Callable[[str], None] = _warn) -> None:
        self._callbacks = list(callbacks)
        self._log = log

    def _call(self, event: str, *about: Any) -> bool:
        """Whether one of the callbacks, all of which are called, returned True."""
        stop = False
        for callback in tuple(self._callbacks):
            try:
                stop |= bool(getattr(callback, event)(*about))
            except Exception as error:
                self._callbacks.remove(callback)
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self._log(f"{type(callback).__name__} failed ({reason}); the run continues without it.")
        return stop


for _event in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(CallbackList, _event, partialmethod(CallbackList._call, _event))


@contextmanager
def callback_scope(callback: Callback | None, settings: Mapping[str, Any]) -> Iterator[CallbackList]:
    """Around the work: `on_start` before it and `on_end` after it, however it ends.

    Args:
        callback: A user's callback, whose failures do not end the run, or None.
        settings: What is computed.

    Yields:
        What to call at the events of the work.
    """
    callbacks = callback if isinstance(callback, CallbackList) else CallbackList(*filter(None, [callback]))
    callbacks.on_start(settings)
    try:
        yield callbacks
    except BaseException as error:
        callbacks.on_end(error)
        raise
    callbacks.on_end(None)

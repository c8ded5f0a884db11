"""The one protocol by which a run tells of itself: to the terminal, to files, to trackers, to a user's own code."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedunfold.core.messages import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights


class Callback:
    """Told of a run as it goes; does nothing by itself. Override what is of interest.

    The methods are called in the order in which they stand here, `kept` by the command line alone. Weights that are
    learned outside a comparison go by the method name "learned".

    >>> import fedunfold as fu
    >>> class Printer(fu.Callback):
    ...     def learning(self, method, so_far, iterations):
    ...         print(f"{method}: outer iteration {len(so_far.losses)} of {iterations}")
    >>> learned = fu.learn_weights("digits-label-skew", learning=fu.Learning(iterations=2), tracker=Printer())
    learned: outer iteration 1 of 2
    learned: outer iteration 2 of 2
    """

    def began(self, settings: Mapping[str, Any]) -> None:
        """The work begins: what was asked for, as plain values, maps and lists."""

    def learning(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        """An outer iteration ended; `iterations` are to be made in all."""

    def round(self, method: str, trial: int, round: int, seen: Evaluation) -> None:
        """A round of a trial ended, with this test of its model. Trials on a GPU go through each round together."""

    def trial(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        """A trial ended."""

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What came out, a row for each method; accuracies in percent."""

    def ended(self, failure: BaseException | None) -> None:
        """The work is over, or ended by this failure (KeyboardInterrupt: Ctrl-C)."""

    def kept(self, files: Sequence[Path]) -> None:
        """What the run leaves has been written to these files."""


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)


class CallbackList(Callback):
    """Several in turn. One that fails is told of once and hears nothing more, and the run goes on without it."""

    def __init__(self, *trackers: Callback, say: Callable[[str], None] = _warn) -> None:
        self._trackers = list(trackers)
        self._say = say

    @classmethod
    def of(cls, tracker: Callback | None) -> "CallbackList":
        """A user's tracker, or none, so that its failures do not end the run."""
        if isinstance(tracker, CallbackList):
            return tracker
        return cls() if tracker is None else cls(tracker)

    def began(self, settings: Mapping[str, Any]) -> None:
        self._tell(lambda tracker: tracker.began(settings))

    def learning(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self._tell(lambda tracker: tracker.learning(method, so_far, iterations))

    def round(self, method: str, trial: int, round: int, seen: Evaluation) -> None:
        self._tell(lambda tracker: tracker.round(method, trial, round, seen))

    def trial(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self._tell(lambda tracker: tracker.trial(method, trial, trials, result))

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tell(lambda tracker: tracker.table(rows))

    def ended(self, failure: BaseException | None) -> None:
        self._tell(lambda tracker: tracker.ended(failure))

    def kept(self, files: Sequence[Path]) -> None:
        self._tell(lambda tracker: tracker.kept(files))

    def _tell(self, tell: Callable[[Callback], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                tell(tracker)
            except Exception as error:
                # Hours of training are worth more than their record elsewhere.
                self._trackers.remove(tracker)
                about = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self._say(f"{type(tracker).__name__} failed ({about}); the run goes on without it.")


class Learner(Callback):
    """A method's learning inside a comparison: its iterations are told under the method's name, and nothing else."""

    def __init__(self, outer: Callback, method: str) -> None:
        self._outer, self._method = outer, method

    def learning(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self._outer.learning(self._method, so_far, iterations)


@contextmanager
def callback_scope(tracker: Callback | None, settings: Mapping[str, Any]) -> Iterator[CallbackList]:
    """Around the work: tells of its beginning and of its end, however it ends."""
    heard = CallbackList.of(tracker)
    heard.began(settings)
    try:
        yield heard
    except BaseException as error:
        heard.ended(error)
        raise
    heard.ended(None)

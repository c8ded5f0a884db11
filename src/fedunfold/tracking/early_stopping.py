"""Stopping a trial that no longer gets better."""

from typing import Any, Literal

from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.settings import is_count
from fedunfold.tracking.callback import Callback


class EarlyStopping(Callback):
    """Stops a trial where its test has not improved for some rounds.

    A round improves on the best one so far where its loss is lower, or its score better, by more than `min_delta`.
    Every trial of every method is counted by itself.

    Use it where rounds are expensive and the test set is not what the result is reported on: whoever stops by the test
    set has chosen by it.

    Reference: L. Prechelt, Early stopping – but when?, in: Neural Networks: Tricks of the Trade, 1998.

    Args:
        patience: After so many rounds in a row without improvement the trial stops.
        min_delta: A smaller improvement does not count; accuracies are fractions.
        metric: What is watched, "loss" or "score", the task's primary metric in its own direction.

    >>> import fedunfold as fu
    >>> from fedunfold.core.outcomes import Evaluation
    >>> stopping = EarlyStopping(patience=2, metric="score")
    >>> [stopping.on_round_end("fedavg", 0, t, Evaluation(a, 1.0)) for t, a in enumerate([0.5, 0.6, 0.6, 0.59])]
    [False, False, False, True]
    """

    def __init__(self, patience: int, min_delta: float = 0.0, metric: Literal["loss", "score"] = "loss") -> None:
        if not is_count(patience):
            raise InputError(f"patience must be a whole number of at least 1, not {patience!r}.")
        if not min_delta >= 0:
            raise InputError(f"min_delta must be a number >= 0, not {min_delta!r}.")
        if metric not in ("loss", "score"):
            raise InputError(f"metric must be 'loss' or 'score', not {metric!r}.")
        self.patience, self.min_delta, self.metric = patience, min_delta, metric
        self._best: dict[tuple[str, int], tuple[float, int]] = {}

    def on_start(self, settings: Any) -> None:
        self._best = {}

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> bool:
        value = evaluation.loss
        if self.metric == "score":
            value = evaluation.primary.gain(0.0, over=evaluation.score)
        best, since = self._best.setdefault((method, trial), (value, round_index))
        if value < best - self.min_delta:
            self._best[method, trial] = value, round_index
            return False
        return round_index - since >= self.patience

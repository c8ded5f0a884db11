"""A run's events as plain records and scalars, the same for every place they are written to."""

import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking.callback import Callback

DEEPEST = 8  # settings within settings


def iteration_records(so_far: LearnedWeights) -> list[dict[str, Any]]:
    """The number m, from 0, and the outer loss of every outer iteration."""
    return [{"iteration": m, "outer_loss": loss} for m, loss in enumerate(so_far.losses.tolist())]


def round_record(method: str, trial: int, round_index: int, evaluation: Evaluation) -> dict[str, Any]:
    """A round's test, fractions in percent; None for a class that the test set does not have.

    Args:
        method: The method's name.
        trial: The trial's number.
        round_index: The round's number.
        evaluation: Its test.
    """
    classes, primary = evaluation.class_accuracy.tolist(), evaluation.primary
    metrics = primary.shown(evaluation.score, evaluation.metrics)
    return {
        "method": method,
        "trial": trial,
        "round": round_index,
        primary.name: metrics[primary.name],
        "loss": evaluation.loss,
        "class_accuracy": [None if math.isnan(value) else 100 * value for value in classes],
        "metrics": metrics,
    }


def mean_weights(weights: Tensor, keys: Sequence[str]) -> dict[str, float]:
    """(1/T) Σ_t Θ[t, k] of every client k; none where there are no weights, as of a reference.

    Args:
        weights: Θ, [T, K] or [T, 0].
        keys: The clients' names.
    """
    return dict(zip(keys if weights.shape[1] else (), weights.mean(0).tolist(), strict=True))


class Scalar(NamedTuple):
    """One value of a curve.

    Attributes:
        name: The curve's name.
        value: The value.
        step: Where on the curve.
    """

    name: str
    value: float
    step: int = 0


class ScalarCallback(Callback):
    """Turns the events of a run into scalars, for services that draw curves.

    | curve | step |
    |---|---|
    | <method>/learning/outer_loss, …/mean_weight/<client> | outer iteration |
    | <method>/trial-<i>/<metric>, …/loss, …/class_accuracy/<class> | round |
    | <method>/trial-<i>/mean_weight/<client> | 0 |
    | <method>/final/… | 0, the final table |
    | pretraining/loss, pretraining/validation_… | step of pre-training |
    | fine-tuning/validation_loss | step of fine-tuning, 0 before the first |
    """

    _clients: Sequence[str]

    @abstractmethod
    def log_scalars(self, scalars: Sequence[Scalar]) -> None:
        """Write them."""

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self._clients = settings["clients"]

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        record, name = iteration_records(so_far)[-1], f"{method}/learning"
        loss = Scalar(f"{name}/outer_loss", record["outer_loss"], record["iteration"])
        self.log_scalars([loss, *_mean_weights(name, so_far.weights, so_far.client_ids, record["iteration"])])

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
        record, name = round_record(method, trial, round_index, evaluation), f"{method}/trial-{trial}"
        classes = [
            Scalar(f"{name}/class_accuracy/{label}", accuracy, round_index)
            for label, accuracy in enumerate(record["class_accuracy"])
            if accuracy is not None
        ]
        values = {**record["metrics"], "loss": record["loss"]}
        known = [Scalar(f"{name}/{what}", value, round_index) for what, value in values.items() if value is not None]
        self.log_scalars([*known, *classes])

    def on_pretraining_step(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        self.log_scalars([Scalar(f"pretraining/{name}", value, step) for name, value in values.items()])

    def on_fine_tuning_step(self, step: int, steps: int, loss: float) -> None:
        self.log_scalars([Scalar("fine-tuning/validation_loss", loss, step)])

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self.log_scalars(_mean_weights(f"{method}/trial-{trial}", result.weights, self._clients, 0))

    def on_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.log_scalars(
            [
                Scalar(f"{row['method']}/final/{name}", value)
                for row in rows
                for name, value in {**row.get("metrics", {}), **row}.items()
                if isinstance(value, int | float)
            ]
        )


def _mean_weights(name: str, weights: Tensor, keys: Sequence[str], step: int) -> list[Scalar]:
    return [Scalar(f"{name}/mean_weight/{key}", value, step) for key, value in mean_weights(weights, keys).items()]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level, with dots between the names; lists in JSON.

    >>> flattened({"seed": 0, "learning": {"lr": 0.1, "decay": None}, "methods": ["fedavg"]})
    {'seed': 0, 'learning.lr': 0.1, 'learning.decay': None, 'methods': '["fedavg"]'}
    """
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple | Mapping) else value
        for name, value in leaves(settings)
    }


def leaves(settings: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """(name, value) of nested settings, with dots between the names; what is nested too deep is one value.

    Args:
        settings: The settings.
        prefix: What the names begin with.
        depth: How deep they are nested already.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth < DEEPEST:
            yield from leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value

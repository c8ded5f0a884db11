"""A run's events as plain records, the same for every place they are written to."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedunfold.core.messages import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights


def iteration_records(so_far: LearnedWeights) -> list[dict[str, Any]]:
    """The number m, from 0, and the outer loss of every outer iteration."""
    return [{"iteration": m, "outer_loss": loss} for m, loss in enumerate(so_far.losses.tolist())]


def round_record(method: str, trial: int, round: int, seen: Evaluation) -> dict[str, Any]:
    """A round's test, accuracies in percent; None for a class that the test set does not have."""
    return {
        "method": method,
        "trial": trial,
        "round": round,
        "accuracy": 100 * seen.accuracy,
        "loss": seen.loss,
        "class_accuracy": [None if math.isnan(value) else 100 * value for value in seen.class_accuracy.tolist()],
    }


def mean_weights(weights: Tensor, keys: Sequence[str]) -> dict[str, float]:
    """(1/T) Σ_t Θ[t, k] of every client k."""
    return dict(zip(keys, weights.mean(0).tolist(), strict=True))


class Scalar(NamedTuple):
    """One value of a curve."""

    name: str
    value: float
    step: int = 0


def of_iteration(method: str, so_far: LearnedWeights) -> list[Scalar]:
    """The outer loss of the last iteration, and the clients' mean weights after it."""
    record, name = iteration_records(so_far)[-1], f"{method}/learning"
    weights = _weights(name, mean_weights(so_far.weights, so_far.client_ids), record["iteration"])
    return [Scalar(f"{name}/outer_loss", record["outer_loss"], record["iteration"]), *weights]


def of_round(method: str, trial: int, round: int, seen: Evaluation) -> list[Scalar]:
    """Accuracy, loss, and the accuracy on every class of the test set."""
    record, name = round_record(method, trial, round, seen), f"{method}/trial-{trial}"
    classes = [
        Scalar(f"{name}/class_accuracy/{label}", accuracy, round)
        for label, accuracy in enumerate(record["class_accuracy"])
        if accuracy is not None
    ]
    return [*(Scalar(f"{name}/{what}", record[what], round) for what in ("accuracy", "loss")), *classes]


def of_trial(method: str, trial: int, result: RunResult, keys: Sequence[str]) -> list[Scalar]:
    """The clients' mean weights, as a rule chose them or as they were learned."""
    return _weights(f"{method}/trial-{trial}", mean_weights(result.weights, keys), 0)


def of_table(rows: Sequence[Mapping[str, Any]]) -> list[Scalar]:
    """The numbers of the final table."""
    return [
        Scalar(f"{row['method']}/final/{name}", value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float)
    ]


def _weights(name: str, weights: Mapping[str, float], step: int) -> list[Scalar]:
    return [Scalar(f"{name}/mean_weight/{key}", weight, step) for key, weight in weights.items()]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level, with dots between the names; lists in JSON.

    >>> flattened({"seed": 0, "learning": {"lr": 0.1, "decay": None}, "methods": ["fedavg"]})
    {'seed': 0, 'learning.lr': 0.1, 'learning.decay': None, 'methods': '["fedavg"]'}
    """
    return dict(_leaves("", settings))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple) else value

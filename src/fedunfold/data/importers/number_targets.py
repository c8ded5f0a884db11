"""Targets of a table that are no classes: a number, or the time and the event of survival."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.core.task import Task
from fedunfold.data.importers.cells import NEEDS_PANDAS
from fedunfold.tasks.regression import Regression
from fedunfold.tasks.survival import Survival

if TYPE_CHECKING:
    from pandas import DataFrame

Targets = NDArray[Any]


def read_targets(rows: "DataFrame", columns: Sequence[str], table: str, task: Task) -> Targets:
    """The targets of a table's rows, as the task takes them.

    Args:
        rows: The columns as texts; the index is the line.
        columns: One, or that of the times and that of the events.
        table: What messages call it.
        task: What they are the targets of.

    Returns:
        [N, columns].

    Raises:
        InputError: A cell is empty or no number, or none that the task takes.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    found = np.empty((len(rows), len(columns)))
    for position, name in enumerate(columns):
        numbers = pandas.to_numeric(rows[name], errors="coerce")
        for line, text in rows[name][~np.isfinite(numbers)].items():
            what = f"{text!r} is no number" if isinstance(text, str) else "is empty"
            raise InputError(f"{table}, line {line}, column {name}: {what}; correct it or delete the row.")
        found[:, position] = numbers
    return task.check_targets(found, f"{' and '.join(columns)} in {table}")


def strata(targets: Targets, task: Task) -> NDArray[np.int64]:
    """What a test set gets a part of each of: the rows with and without an event, or all rows alike."""
    events = targets[:, 1] if isinstance(task, Survival) else np.zeros(len(targets))
    return events.astype(np.int64)


def standardise(
    train: Mapping[str, tuple[Any, Targets]], test: tuple[Any, Targets]
) -> tuple[dict[str, tuple[Any, Targets]], tuple[Any, Targets], dict[str, float]]:
    """Give the targets of a regression mean 0 and deviation 1 over all training rows.

    Args:
        train: (rows, targets) by client.
        test: (rows, targets) of the test set.

    Returns:
        Both with other targets, and the mean and scale that give back the old ones.
    """
    pooled = np.concatenate([y for _, y in train.values()]).astype(np.float64)
    mean, sd = float(pooled.mean()), float(pooled.std())
    scale = sd if sd > 0 else 1.0

    def scaled(pair: tuple[Any, Targets]) -> tuple[Any, Targets]:
        return pair[0], ((pair[1] - mean) / scale).astype(np.float32)

    return {key: scaled(pair) for key, pair in train.items()}, scaled(test), {"mean": mean, "scale": scale}


def is_standardised(task: Task, scaling: str) -> bool:
    """Whether the targets of a task are standardised beside the features."""
    return isinstance(task, Regression) and scaling == "standard"

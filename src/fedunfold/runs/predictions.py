"""Predictions of a run's model for new rows of a table, with the preprocessing that its training data had."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.data.importers.cells import read_ids
from fedunfold.data.importers.csv import CsvTable
from fedunfold.data.importers.recipe import encode_new_rows
from fedunfold.io.atomic import write_atomically
from fedunfold.runs.trained_model import TrainedModel
from fedunfold.tasks import binary, classification, multilabel, regression, survival


@dataclass(frozen=True)
class Predictions:
    """A prediction for every row.

    Attributes:
        columns: What each value is: `prediction`, `probability of <class>`, `risk`, …, after the column of ids, where
            the training data had one and the rows have it.
        rows: The values, one list for each row.
        notes: What to know of the rows.
    """

    columns: tuple[str, ...]
    rows: list[list[Any]]
    notes: tuple[str, ...]

    def csv(self) -> str:
        """As the text of a CSV file, in the order of the rows."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def write(self, file: Path) -> None:
        """As a CSV file."""
        write_atomically(file, lambda temporary: temporary.write_text(self.csv(), encoding="utf-8"))


def predict(trained: TrainedModel, file: Path) -> Predictions:
    """Predict for the rows of a CSV file.

    Args:
        trained: The run's model.
        file: Rows with the columns of the training data; the label may be missing.

    Raises:
        InputError: The model was not trained on a table, or the file does not fit.
    """
    recipe = trained.record.columns
    if recipe is None:
        raise InputError(
            "the run's data did not come from a table, so that how columns become features is not known; load the "
            "model in Python and pass it rows as it was trained on."
        )
    table = CsvTable(file)
    x, notes = encode_new_rows(table, recipe["features"])
    features = torch.from_numpy(x)
    if not features.isfinite().all():
        row = int((~features.isfinite().all(1)).nonzero()[0])
        raise InputError(f"{file}: row {row + 1} has a number that is too large; correct it.")
    columns, values = _shown(trained, trained.outputs(features.view(-1, *trained.record.features)), recipe)
    name = recipe.get("id")
    if name in table.columns:
        ids = read_ids(table, name)
        columns, values = (name, *columns), [[own, *row] for own, row in zip(ids, values, strict=True)]
    return Predictions(columns, values, tuple(notes))


def _shown(trained: TrainedModel, outputs: Tensor, recipe: dict[str, Any]) -> tuple[tuple[str, ...], list[list[Any]]]:
    task, names = trained.task, trained.record.class_names
    if isinstance(task, classification | binary):
        classes = names or tuple(map(str, range(task.classes)))
        shares = outputs.softmax(1)
        rows = [[classes[int(own.argmax())], *own.tolist()] for own in shares]
        return ("prediction", *(f"probability of {name}" for name in classes)), rows
    if isinstance(task, multilabel):
        return tuple(f"probability of label {c}" for c in range(task.labels)), outputs.sigmoid().tolist()
    if isinstance(task, regression):
        target = recipe.get("target", {"mean": 0.0, "scale": 1.0})
        return ("prediction",), (outputs * target["scale"] + target["mean"]).tolist()
    if isinstance(task, survival):
        return ("risk",), outputs.tolist()
    raise InputError(f"predictions of the task {task.name} do not fit a table; load the model in Python.")

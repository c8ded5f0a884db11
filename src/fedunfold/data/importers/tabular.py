"""From tables of text to arrays: what columns hold, what may be wrong with them, and the features made of them.

Kinds of columns, the median that fills gaps, mean and standard deviation come from the training rows of all clients
together. A simulation can do that; in a real federation they are agreed on once, from what sites may share, and the
recipe written beside the data says what was used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.core.task import Task
from fedunfold.data.arrays import Labels
from fedunfold.data.importers.cells import NEEDS_PANDAS, read_rows, strip
from fedunfold.data.importers.classes import Classes
from fedunfold.data.importers.column_kinds import column_kinds
from fedunfold.data.importers.columns import common_columns, find_labels, note_order, texts_of
from fedunfold.data.importers.csv import Table
from fedunfold.data.importers.findings import (
    look_at_classes,
    look_at_columns,
    look_at_ids,
    look_at_names,
    look_at_rows,
    look_at_targets,
)
from fedunfold.data.importers.imported import ImportedData, note_thin_data, split_off_test
from fedunfold.data.importers.number_targets import is_standardised, read_targets, standardise, strata
from fedunfold.data.importers.recipe import Scaling, apply_recipe, make_recipe
from fedunfold.io.limits import TABLE_CLASSES
from fedunfold.tasks.classification import Classification
from fedunfold.tasks.regression import Regression

if TYPE_CHECKING:
    from pandas import DataFrame


class ColumnOptions(TypedDict, total=False):
    """The arguments of `encode` about columns, for importers that pass them on."""

    drop: Sequence[str]
    categorical: Sequence[str]
    id: str | None
    positive: str | None
    missing_indicators: bool
    scaling: Scaling


def encode(
    clients: Mapping[str, Table],
    test: Table | float,
    label: str | tuple[str, str],
    *,
    task: Task | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    id: str | None = None,
    positive: str | None = None,
    missing_indicators: bool = False,
    scaling: Scaling = "standard",
    seed: int = 0,
) -> ImportedData:
    """Turn the clients' tables into arrays.

    Args:
        clients: A table for each client's key, all with the same columns in any order.
        test: The test set's table, or the fraction of each client's rows of each class that becomes it.
        label: The column to predict, or those of the times and of the events of survival.
        task: What a model is trained for; without it, classification.
        drop: Columns to leave out.
        categorical: Columns of categories, the label's among them, whatever their cells look like.
        id: The column that tells rows apart: no feature, but checked, and written beside predictions.
        positive: The one of two classes that gets the number 1.
        missing_indicators: Whether a column of numbers with missing cells also gets a feature that is 1 for them.
        scaling: "standard" gives numbers, a regression's targets among them, mean 0 and deviation 1 over all training
            rows, "none" leaves them.
        seed: Draws the rows of the test set.

    Returns:
        The arrays, with the recipe that made them, and what may be a mistake in the data.

    Raises:
        InputError: A table, column, row or cell cannot be used; the message names it.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    tables = [*clients.values(), *([] if isinstance(test, float) else [test])]
    targets = (label,) if isinstance(label, str) else label
    names = common_columns(tables, targets, drop, categorical, id)
    kinds = column_kinds(list(clients.values()), names, categorical)
    frames = {key: read_rows(table, names, targets, kinds.texts, typos=kinds.typos) for key, table in clients.items()}
    texts = texts_of(pandas.concat(frames.values()), names, kinds.texts, categorical)
    missing: Any = sum(frame.isna().sum() for frame in frames.values())
    if task is None or isinstance(task, Classification):
        classes = Classes.of(
            find_labels(clients, frames, targets[0]),
            targets[0],
            rows=sum(map(len, frames.values())),
            categorical=targets[0] in categorical,
            positive=positive,
        )
        found: tuple[str, ...] = classes.names
        groups: Callable[[Any], Labels] | None = None
        read: Callable[..., NDArray[Any]] = partial(_class_numbers, classes=classes, label=targets[0])
    else:
        if positive is not None:
            raise InputError(f"`positive` is about two classes and not about {task.name}; leave it out.")
        for name in {*targets} & {*categorical}:
            raise InputError(f"`categorical`: {name} is what {task.name} predicts, a number; leave it out.")
        found, groups = (), partial(strata, task=task)
        read = partial(read_targets, columns=targets, task=task)
    rows = {key: (frame, read(frame, table=clients[key].name)) for key, frame in frames.items()}
    held: Any = test
    if not isinstance(test, float):
        frame = read_rows(test, names, targets, kinds.texts)
        held = frame, read(frame, table=test.name)
    findings = [
        *kinds.findings,
        *(finding for table in tables for finding in table.findings()),
        *look_at_names(tables[0]),
        *look_at_columns(frames, texts),
        *look_at_classes({key: y for key, (_, y) in rows.items()} if found else {}, found, targets[0]),
        *(look_at_targets(frames, targets[0]) if isinstance(task, Regression) else ()),
        *look_at_rows(frames, None if isinstance(test, float) else held[0], clients),
        *(look_at_ids(clients, id) if id is not None else ()),
    ]
    train, tested = split_off_test(rows, found or ("", "event"), held, seed, pandas.concat, groups)
    gaps = missing if missing_indicators else {}
    recipe = make_recipe(texts, pandas.concat([x for x, _ in train.values()]), scaling, gaps)
    about: dict[str, Any] = {"label": label, "classes": list(found), "features": recipe}
    if id is not None:
        about["id"] = id
    notes = [
        *note_order({table.name: table.columns for table in tables}),
        *_notes(texts, missing, scaling),
        *note_thin_data(train, tested, found),
    ]
    if task is not None:
        about["task"] = task.describe()
        if is_standardised(task, scaling):
            train, tested, about["target"] = standardise(train, tested)
            notes.append(
                f"{label} was standardised: errors are in its standard deviations, of {about['target']['scale']:.4g}."
            )
    return ImportedData(
        {key: (apply_recipe(recipe, x), y) for key, (x, y) in train.items()},
        (apply_recipe(recipe, tested[0]), tested[1]),
        found,
        tuple(notes),
        about,
        task,
        tuple(findings),
    )


def _class_numbers(rows: "DataFrame", table: str, classes: Classes, label: str) -> Labels:
    return classes.number(rows[label], table)


def labels_in(tables: Iterable[Table], label: str) -> set[str]:
    """The different values of a column, as texts; no more than are enough to see that they are no classes.

    Args:
        tables: The clients' tables; those without the column count as empty.
        label: The column.
    """
    found: set[str] = set()
    for table in tables:
        for block in table.blocks([label], {label}) if label in table.columns else ():
            found |= set(strip(block[label]).dropna().unique())
            if len(found) > TABLE_CLASSES.value:
                return found
    return found


def _notes(texts: Mapping[str, list[str]], missing: Mapping[str, int], scaling: Scaling) -> list[str]:
    """What was done to the columns."""
    numbers = [name for name in texts if not texts[name]]
    counted = (
        ("text columns became one feature for each value", {name: len(texts[name]) for name in texts}),
        ("missing numbers were filled with the median over all clients", {name: missing[name] for name in numbers}),
        ("missing texts became 0 in all of the column's features", {n: missing[n] for n in texts if texts[n]}),
    )
    listed = [(done, ", ".join(f"{name} ({n})" for name, n in counts.items() if n)) for done, counts in counted]
    notes = [f"{done}: {columns}." for done, columns in listed if columns]
    if scaling == "standard" and numbers:
        notes.append("numbers were standardised with mean and deviation of all clients' training rows.")
    return notes

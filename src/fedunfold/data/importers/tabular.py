"""From tables of text to arrays: numbers as they are, texts one-hot, gaps filled, everything on one scale.

Kinds of columns, the median that fills gaps, mean and standard deviation come from the training rows of all clients
together. A simulation can do that; in a real federation they are agreed on once, from what sites may share, and the
recipe written beside the data says what was used.

The features are computed from that recipe and not by scikit-learn's ColumnTransformer, which takes 6 to 13 times as
long, and whose StandardScaler leaves a million timestamps unscaled because it takes them for constant.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.core.task import Task
from fedunfold.data.arrays import Labels
from fedunfold.data.importers.classes import Classes
from fedunfold.data.importers.csv import MISSING, NEEDS_PANDAS, Table
from fedunfold.data.importers.imported import ImportedData, note_thin_data, split_off_test
from fedunfold.data.importers.number_targets import is_standardised, read_targets, standardise, strata
from fedunfold.io.limits import TABLE_CLASSES, TABLE_NUMBERS, TABLE_TEXTS
from fedunfold.tasks.classification import Classification

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Scaling = Literal["standard", "none"]
Recipe = Sequence[Mapping[str, Any]]

LARGEST = float(np.finfo(np.float32).max)
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def encode(
    clients: Mapping[str, Table],
    test: Table | float,
    label: str | tuple[str, str],
    *,
    task: Task | None = None,
    drop: Sequence[str] = (),
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
        scaling: "standard" gives numbers, a regression's targets among them, mean 0 and deviation 1 over all training
            rows, "none" leaves them.
        seed: Draws the rows of the test set.

    Returns:
        The arrays, with the recipe that made them.

    Raises:
        InputError: A table, column, row or cell cannot be used; the message names it.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    tables = [*clients.values(), *([] if isinstance(test, float) else [test])]
    targets = (label,) if isinstance(label, str) else label
    names = _common_columns(tables, targets, drop)
    first_texts = _find_texts(list(clients.values()), names)
    frames = {key: _read(table, names, targets, first_texts) for key, table in clients.items()}
    texts = _texts(pandas.concat(frames.values()), names, first_texts)
    missing: Any = sum(frame.isna().sum() for frame in frames.values())
    if task is None or isinstance(task, Classification):
        classes = Classes.of(_find_labels(clients, frames, targets[0]), targets[0])
        found: tuple[str, ...] = classes.names
        groups: Callable[[Any], Labels] | None = None
        read: Callable[..., NDArray[Any]] = partial(_class_numbers, classes=classes, label=targets[0])
    else:
        found, groups = (), partial(strata, task=task)
        read = partial(read_targets, columns=targets, task=task)
    rows = {key: (frame, read(frame, table=clients[key].name)) for key, frame in frames.items()}
    held: Any = test
    if not isinstance(test, float):
        frame = _read(test, names, targets, first_texts)
        held = frame, read(frame, table=test.name)
    train, tested = split_off_test(rows, found or ("", "event"), held, seed, pandas.concat, groups)
    recipe = _recipe(texts, pandas.concat([x for x, _ in train.values()]), scaling)
    about: dict[str, Any] = {"label": label, "classes": list(found), "features": recipe}
    notes = [*_notes(texts, missing, scaling), *note_thin_data(train, tested, found)]
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
            found |= set(_strip(block[label]).dropna().unique())
            if len(found) > TABLE_CLASSES.value:
                return found
    return found


def _common_columns(tables: Sequence[Table], targets: Sequence[str], drop: Sequence[str]) -> list[str]:
    """The feature columns in the first table's order; every table has to have the same ones."""
    first = tables[0]
    for has, lacks in (pair for table in tables for pair in ((first, table), (table, first))):
        for name in has.columns:
            if name not in drop and name not in lacks.columns:
                raise InputError(f"{lacks.name} has no column {name}, which {has.name} has; add it, or `drop` it.")
    options = ("label",) if len(targets) == 1 else ("time", "event")
    for option, name in zip(options, targets, strict=True):
        if name not in first.columns:
            raise InputError(f"`{option}`: {first.name} has no column {name}, only {', '.join(first.columns)}.")
    for name in drop:
        if name in targets or not any(name in table.columns for table in tables):
            reason = "is the label" if name in targets else "is in no file"
            raise InputError(f"`drop`: column {name} {reason}; leave it out.")
    names = [name for name in first.columns if name not in targets and name not in drop]
    if not names:
        raise InputError(f"{first.name} has no column but the label {' and '.join(targets)}; give it features.")
    return names


def _parse(cells: "Series") -> "tuple[Series, Series]":
    """(the cells as numbers, NaN where one is none; those that are neither numbers nor missing)."""
    if cells.dtype.kind in "iuf":
        return cells.astype(float), cells[:0]
    pandas = import_extra("pandas", NEEDS_PANDAS)
    present = _strip(cells).dropna()
    numbers = pandas.to_numeric(present, errors="coerce")
    return numbers.reindex(cells.index).astype(float), present[numbers.isna()]


def _strip(cells: "Series") -> "Series":
    """Texts without the blanks around them, NaN where that leaves a word for a missing cell, or nothing."""
    stripped = cells.astype(str).str.strip()
    return stripped.mask(cells.isna() | stripped.str.lower().isin(MISSING))


def _find_texts(tables: Sequence[Table], names: Sequence[str]) -> dict[str, str]:
    """The columns in which any client has a text, and where the first one is."""
    found: dict[str, str] = {}
    total = 0
    for table in tables:
        for block in table.blocks(names, ()):
            total += len(block)
            TABLE_NUMBERS.check(total * len(names), f"{table.name}: use an .npz file for large data: ")
            for name in names:
                for line, text in _parse(block[name])[1][:1].items():
                    found.setdefault(name, f"{table.name}, line {line}: {text[:40]!r}")
    return found


def _read(table: Table, names: Sequence[str], targets: Sequence[str], texts: Collection[str]) -> "DataFrame":
    """Texts and numbers by column, the targets' texts among them; NaN for gaps, the index is the line."""
    pandas = import_extra("pandas", NEEDS_PANDAS)
    blocks = []
    for block in table.blocks([*targets, *names], {*targets, *texts}):
        columns = {name: _strip(block[name]) for name in (*targets, *texts)}
        for name in names:
            if name in texts:
                continue
            columns[name], others = _parse(block[name])
            for line, text in others.items():  # only in a test table
                raise InputError(f"{table.name}, line {line}, column {name}: {text!r} is no number, as at the clients.")
            for line, number in columns[name][np.isinf(columns[name])].items():
                where = f"{table.name}, line {line}, column {name}"
                raise InputError(f"{where}: {number} is not a finite number; correct it or leave the cell empty.")
        blocks.append(pandas.DataFrame(columns))
    if not sum(map(len, blocks)):
        raise InputError(f"{table.name} has a header but no row; add rows or remove the file.")
    return pandas.concat(blocks)


def _texts(rows: "DataFrame", names: Sequence[str], first_texts: Mapping[str, str]) -> dict[str, list[str]]:
    """The different texts of each column, none where all cells are numbers; refuses what cannot be a feature."""
    found: dict[str, list[str]] = {}
    for name in names:
        if rows[name].isna().all():
            raise InputError(f"column {name} is empty at every client; `drop` it.")
        found[name] = sorted(rows[name].dropna().unique()) if name in first_texts else []
        where = f"column {name} ({first_texts.get(name)})"
        if any(DECIMAL_COMMA.fullmatch(text) for text in found[name]):
            raise InputError(f"{where} has decimal commas; write decimals with a point.")
        TABLE_TEXTS.check(len(found[name]), f"{where} is text; correct it, or `drop` it: ")
    width = sum(len(texts) or 1 for texts in found.values())
    TABLE_NUMBERS.check(len(rows) * width, "`drop` text columns, or use an .npz file for large data: ")
    return found


def _find_labels(tables: Mapping[str, Table], frames: "Mapping[str, DataFrame]", label: str) -> dict[str, str]:
    """The labels, and where each occurs first."""
    found: dict[str, str] = {}
    for key, frame in frames.items():
        for line, text in frame[label].drop_duplicates().items():
            where = f"{tables[key].name}, line {line}"
            if not isinstance(text, str):
                raise InputError(f"{where}: the label column {label} is empty; fill it in or delete the row.")
            found.setdefault(text, where)
            TABLE_CLASSES.check(len(found), f"{where}: column {label} is no column of classes: ")
    return found


def _recipe(texts: Mapping[str, list[str]], train: "DataFrame", scaling: Scaling) -> list[dict[str, Any]]:
    """For each feature: its column, the text it stands for or the number that fills its gaps, mean and scale."""
    recipe: list[dict[str, Any]] = []
    for name, choices in texts.items():
        if choices:
            recipe += [{"column": name, "is": text} for text in choices]
            continue
        values = train[name]
        median = float(values.median()) if values.notna().any() else 0.0
        values = values.fillna(median)
        if values.abs().max() > LARGEST:
            raise InputError(f"column {name} has numbers beyond {LARGEST:g}; give it another unit, or `drop` it.")
        mean, scale = 0.0, 1.0
        if scaling == "standard":
            constant = values.min() == values.max()  # rounding may leave a deviation, by which a test row would explode
            mean = float(values.iloc[0] if constant else values.mean())
            scale = 1.0 if constant else float(values.std(ddof=0))
        recipe.append({"column": name, "missing": median, "mean": mean, "scale": scale})
    return recipe


def apply_recipe(recipe: Recipe, rows: "DataFrame") -> NDArray[np.float32]:
    """(x − mean)/scale with gaps filled for numbers, 1 or 0 for texts.

    Args:
        recipe: An entry for each feature.
        rows: Numbers and texts by column.

    Returns:
        The features, [rows, features]; what is too large for float32 is infinite.
    """
    result = np.empty((len(rows), len(recipe)), dtype=np.float32)
    with np.errstate(over="ignore"):
        for position, entry in enumerate(recipe):
            cells = rows[entry["column"]]
            if "is" in entry:
                result[:, position] = cells == entry["is"]
            else:
                result[:, position] = (cells.fillna(entry["missing"]) - entry["mean"]) / entry["scale"]
    return result


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


def encode_new_rows(table: Table, recipe: Recipe) -> tuple[NDArray[np.float32], list[str]]:
    """Features of rows that were not there when the recipe was made.

    Args:
        table: The rows; columns that the recipe does not know are left out.
        recipe: An entry for each feature, as `encode` made them.

    Returns:
        The features, [rows, features], and what to know of them: texts that no training row had.

    Raises:
        InputError: A column is missing, or a cell is no number where the training rows have numbers.
    """
    names = list(dict.fromkeys(entry["column"] for entry in recipe))
    for name in names:
        if name not in table.columns:
            raise InputError(f"{table.name} has no column {name}, which the model was trained on; add it.")
    known: dict[str, set[str]] = {}
    for entry in recipe:
        if "is" in entry:
            known.setdefault(entry["column"], set()).add(entry["is"])
    rows = _read(table, names, (), known)
    notes = []
    for name, texts in known.items():
        strange = rows[name][rows[name].notna() & ~rows[name].isin(texts)]
        if len(strange):
            first = f"{strange.iloc[0]!r} in line {strange.index[0]}"
            notes.append(f"column {name}: {len(strange)} cells have a text that no training row had, such as {first}.")
    return apply_recipe(recipe, rows), notes

"""From sheets of text to arrays: numbers as they are, texts one-hot, gaps filled, everything on one scale.

Kinds of columns, the median that fills gaps, mean and standard deviation come from the training rows of all clients
together. A simulation can do that; in a real federation they are agreed on once, from what sites may share, and the
recipe written beside the data says what was used.
"""

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.importers.csv import Table
from fedunfold.data.importers.imported import ImportedData, notes_on_rows, split_off_test

Scaling = Literal["standard", "none"]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
MOST_TEXTS = 100  # a text column with more different values is a name or a remark, not a category
MOST_CLASSES = 1000
MOST_NUMBERS = 100_000_000  # 800 MB while they are worked on
LARGEST = float(np.finfo(np.float32).max)
INTEGER = re.compile(r"([+-]?\d+)(\.0*)?")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass
class Column:
    """What the clients' cells of a column are: all numbers, or texts, of which the first is kept for messages."""

    name: str
    filled: int = 0
    missing: int = 0
    texts: dict[str, None] = field(default_factory=dict)
    first_text: str = ""  # where, and what it is

    @property
    def is_text(self) -> bool:
        return bool(self.first_text)

    @property
    def width(self) -> int:
        return len(self.texts) if self.is_text else 1

    def look(self, cell: str, where: str) -> None:
        if is_missing(cell):
            self.missing += 1
            return
        self.filled += 1
        if len(self.texts) <= MOST_TEXTS:
            self.texts[cell.strip()] = None
        if not self.is_text and number(cell, f"{where}, column {self.name}") is None:
            self.first_text = f"{where}: {cell.strip()[:40]!r}"

    def check(self) -> None:
        if not self.filled:
            raise InputError(f"column {self.name} is empty at every client; leave it out with --drop {self.name}.")
        if not self.is_text:
            return
        if any(DECIMAL_COMMA.fullmatch(text) for text in self.texts):
            raise InputError(f"column {self.name} ({self.first_text}) has decimal commas; write decimals with a point.")
        if len(self.texts) > MOST_TEXTS:
            raise InputError(
                f"column {self.name} is text ({self.first_text}) with more than {MOST_TEXTS} different values; "
                f"mend it, or leave it out with --drop {self.name}."
            )


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def number(cell: str, where: str) -> float | None:
    """The cell as a number, or None for a text; an infinite one is refused."""
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        return None
    if math.isinf(value):
        raise InputError(f"{where}: {cell.strip()} is not a finite number; correct it or leave the cell empty.")
    return None if math.isnan(value) else value


def encode(
    clients: Mapping[str, Table],
    test: Table | float,
    label: str,
    *,
    drop: Sequence[str] = (),
    scaling: Scaling = "standard",
    seed: int = 0,
) -> ImportedData:
    """The clients' sheets as arrays. `test` is a sheet, or the fraction of each client's rows that becomes one."""
    sheets = [*clients.values(), *([] if isinstance(test, float) else [test])]
    names = _common_columns(sheets, label, drop)
    columns, labels = _surveyed(list(clients.values()), names, label)
    classes = Classes.of(labels, label)
    rows = {key: _filled(sheet, columns, label, classes) for key, sheet in clients.items()}
    if isinstance(test, float):
        train, held = split_off_test(rows, classes.names, test, seed)
    else:
        train, held = rows, _filled(test, columns, label, classes)
    recipe = _recipe(columns, np.concatenate([x for x, _ in train.values()]), scaling)
    return ImportedData(
        {key: (_applied(recipe, x), y) for key, (x, y) in train.items()},
        (_applied(recipe, held[0]), held[1]),
        classes.names,
        (*_notes(columns, scaling), *notes_on_rows(train, held, classes.names)),
        {"label": label, "classes": list(classes.names), "features": recipe},
    )


def _common_columns(sheets: Sequence[Table], label: str, drop: Sequence[str]) -> list[str]:
    """The feature columns in the first sheet's order; every sheet has to have the same ones."""
    first = sheets[0]
    for sheet in sheets:
        both = [name for name in (*first.columns, *sheet.columns) if name not in drop]
        odd = next((name for name in both if (name in first.columns) != (name in sheet.columns)), None)
        if odd is not None:
            has, lacks = (first, sheet) if odd in first.columns else (sheet, first)
            raise InputError(
                f"{lacks.name} has no column {odd}, which {has.name} has; give all the same ones, or --drop it."
            )
    if label not in first.columns:
        raise InputError(f"--label: {first.name} has no column {label}, only {', '.join(first.columns)}.")
    for name in drop:
        if name == label or not any(name in sheet.columns for sheet in sheets):
            reason = "is the label" if name == label else "is in no file"
            raise InputError(f"--drop: column {name} {reason}; leave it out.")
    names = [name for name in first.columns if name != label and name not in drop]
    if not names:
        raise InputError(f"{first.name} has no column but the label {label}; give it features.")
    return names


def _surveyed(sheets: Sequence[Table], names: Sequence[str], label: str) -> tuple[list[Column], dict[str, str]]:
    """The first pass: what the columns hold, and the labels met with where each was met first."""
    columns = [Column(name) for name in names]
    labels: dict[str, str] = {}
    total = 0
    for sheet in sheets:
        places = [sheet.columns.index(name) for name in names]
        label_place = sheet.columns.index(label)
        before = total
        for line, cells in sheet.rows():
            where = f"{sheet.name}, line {line}"
            total += 1
            if total * len(columns) > MOST_NUMBERS:
                raise InputError(f"{where}: more than {MOST_NUMBERS} numbers are too many for CSV; use an .npz file.")
            if is_missing(cells[label_place]):
                raise InputError(f"{where}: the label column {label} is empty; fill it in or delete the row.")
            labels.setdefault(cells[label_place].strip(), where)
            if len(labels) > MOST_CLASSES:
                raise InputError(
                    f"{where}: column {label} has over {MOST_CLASSES} values, too many for classes; see --label."
                )
            for column, place in zip(columns, places, strict=True):
                column.look(cells[place], where)
        if total == before:
            raise InputError(f"{sheet.name} has a header but no row; add rows or take the file away.")
    for column in columns:
        column.check()
    width = sum(column.width for column in columns)
    if total * width > MOST_NUMBERS:
        raise InputError(f"{total} rows of {width} features are too many for CSV; --drop text columns, or use an .npz.")
    return columns, labels


@dataclass(frozen=True)
class Classes:
    """Class names in order: of size where all are integers (then 1, 01 and 1.0 are one class), else of the alphabet."""

    names: tuple[str, ...]
    integers: bool

    @classmethod
    def of(cls, labels: Mapping[str, str], column: str) -> "Classes":
        """From the labels met, with where each was met first."""
        measured = next((text for text in labels if not INTEGER.fullmatch(text)), None)
        if measured is not None and all(number(text, where) is not None for text, where in labels.items()):
            raise InputError(
                f"{labels[measured]}: column {column} has {measured}, a measurement and no class; "
                "name a column of classes with --label."
            )
        made = cls((), integers=measured is None)
        names = sorted({made.name_of(text) for text in labels}, key=int if made.integers else None)
        if len(names) < 2:
            raise InputError(f"column {column} has only the value {names[0]}, no classes; name another with --label.")
        return cls(tuple(names), made.integers)

    def name_of(self, text: str) -> str:
        match = INTEGER.fullmatch(text) if self.integers else None
        return str(int(match[1])) if match else text


def _filled(
    sheet: Table, columns: Sequence[Column], label: str, classes: Classes
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The second pass: one-hot where a column is text, NaN where a number is missing."""
    places = [sheet.columns.index(column.name) for column in columns]
    label_place = sheet.columns.index(label)
    positions = [
        {text: i for i, text in enumerate(sorted(column.texts))} if column.is_text else None for column in columns
    ]
    numbers = {name: c for c, name in enumerate(classes.names)}
    x, y = array("d"), array("q")
    for line, cells in sheet.rows():
        where = f"{sheet.name}, line {line}"
        found = numbers.get(classes.name_of(cells[label_place].strip()))
        if found is None:  # only a test sheet can get here
            raise InputError(f"{where}: no client has the {label} {cells[label_place].strip()!r}; take the row out.")
        y.append(found)
        for column, place, position in zip(columns, places, positions, strict=True):
            cell = cells[place]
            if position is not None:
                chosen = position.get(cell.strip())  # neither a gap nor a text that no client has is any of them
                x.extend(1.0 if i == chosen else 0.0 for i in range(len(position)))
                continue
            value = math.nan if is_missing(cell) else number(cell, f"{where}, column {column.name}")
            if value is None:
                raise InputError(f"{where}, column {column.name}: {cell.strip()!r} is no number, as at the clients.")
            x.append(value)
    if not y:
        raise InputError(f"{sheet.name} has a header but no row; add rows or take the file away.")
    return np.array(x).reshape(len(y), -1), np.array(y, dtype=np.int64)


def _recipe(columns: Sequence[Column], x: NDArray[np.float64], scaling: Scaling) -> list[dict[str, Any]]:
    """For each feature: its column, the text it stands for or the number that fills its gaps, mean and scale."""
    recipe: list[dict[str, Any]] = []
    for column in columns:
        if column.is_text:
            recipe += [{"column": column.name, "is": text} for text in sorted(column.texts)]
            continue
        values = x[:, len(recipe)]
        present = values[~np.isnan(values)]
        median = float(np.median(present)) if len(present) else 0.0
        filled = np.where(np.isnan(values), median, values)
        mean, scale = 0.0, 1.0
        if scaling == "standard":
            with np.errstate(over="ignore", invalid="ignore"):  # refused by name below
                mean, scale = float(filled.mean()), float(filled.std())
            if filled.min() == filled.max():  # rounding may leave it a deviation, by which a test row would explode
                mean, scale = float(filled[0]), 1.0
        if not math.isfinite(scale) or np.abs(filled).max() > LARGEST:
            raise InputError(
                f"column {column.name} has numbers beyond {LARGEST:g}; give it another unit, or --drop it."
            )
        recipe.append({"column": column.name, "missing": median, "mean": mean, "scale": scale})
    return recipe


def _applied(recipe: Sequence[Mapping[str, Any]], x: NDArray[np.float64]) -> NDArray[np.float32]:
    """(x − mean)/scale, with gaps filled; one-hot features stay 0 and 1."""
    fill, mean, scale = (
        np.array([entry.get(name, default) for entry in recipe])
        for name, default in (("missing", 0.0), ("mean", 0.0), ("scale", 1.0))
    )
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused by client and row
        result: NDArray[np.float32] = ((np.where(np.isnan(x), fill, x) - mean) / scale).astype(np.float32)
    return result


def _notes(columns: Sequence[Column], scaling: Scaling) -> list[str]:
    notes = []
    if texts := [f"{column.name} ({column.width})" for column in columns if column.is_text]:
        notes.append(f"text columns became one feature for each value: {', '.join(texts)}.")
    if gaps := [f"{column.name} ({column.missing})" for column in columns if column.missing and not column.is_text]:
        notes.append(f"missing numbers were filled with the median over all clients: {', '.join(gaps)}.")
    if gaps := [f"{column.name} ({column.missing})" for column in columns if column.missing and column.is_text]:
        notes.append(f"missing texts became 0 in all of the column's features: {', '.join(gaps)}.")
    if scaling == "standard" and not all(column.is_text for column in columns):
        notes.append("numbers were standardised with mean and deviation of all clients' training rows.")
    return notes

"""Which columns of tables are features, and what is in them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedunfold.core.errors import InputError
from fedunfold.data.importers.cells import FEW, alike_spellings
from fedunfold.data.importers.csv import Table
from fedunfold.io.limits import TABLE_CLASSES, TABLE_NUMBERS, TABLE_TEXTS

if TYPE_CHECKING:
    from pandas import DataFrame


def common_columns(
    tables: Sequence[Table], targets: Sequence[str], drop: Sequence[str], categorical: Sequence[str], id: str | None
) -> list[str]:
    """The feature columns that all tables have.

    Args:
        tables: All tables, which have to have the same ones in any order.
        targets: What is predicted, which is no feature.
        drop: Columns that are left out.
        categorical: Columns of categories; those of no table are refused.
        id: The column that tells rows apart, which is no feature either.

    Returns:
        Their names in the first table's order.

    Raises:
        InputError: A table lacks a column, or an argument names one that it cannot be about.
    """
    first = tables[0]
    for has, lacks in (pair for table in tables for pair in ((first, table), (table, first))):
        for name in has.columns:
            if name not in (*drop, id) and name not in lacks.columns:
                alike = next((other for other in lacks.columns if alike_spellings([name, other])), None)
                remedy = f"rename its column {alike!r}" if alike is not None else "add it"
                raise InputError(f"{lacks.name} has no column {name}, which {has.name} has; {remedy}, or `drop` it.")
    options = ("label",) if len(targets) == 1 else ("time", "event")
    for option, name in zip(options, targets, strict=True):
        if name not in first.columns:
            raise InputError(f"`{option}`: {first.name} has no column {name}, only {', '.join(first.columns)}.")
    ids = () if id is None else (id,)
    for option, chosen, barred in (("drop", drop, targets), ("id", ids, targets), ("categorical", categorical, drop)):
        for name in chosen:
            if name in barred or not any(name in table.columns for table in tables):
                what = "is left out" if barred is drop else "is the label"
                raise InputError(
                    f"`{option}`: column {name} {what if name in barred else 'is in no file'}; leave it out."
                )
    names = [name for name in first.columns if name not in (*targets, *drop, *ids)]
    if not names:
        raise InputError(
            f"{first.name} has no column but the label {' and '.join(targets)}; give it features, and separate cells "
            "by commas, semicolons or tabs."
        )
    return names


def texts_of(
    rows: "DataFrame", names: Sequence[str], first_texts: Mapping[str, str], categorical: Sequence[str]
) -> dict[str, list[str]]:
    """The different texts of each column.

    Args:
        rows: The rows of all clients.
        names: The feature columns.
        first_texts: Those that hold texts, with the first of each.
        categorical: Those in which any number of texts is meant.

    Returns:
        By column, in order; none where it holds numbers.

    Raises:
        InputError: A column cannot be a feature.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        filled = rows[name].dropna()
        if not len(filled):
            raise InputError(f"column {name} is empty at every client; `drop` it.")
        found[name] = sorted(filled.unique()) if name in first_texts else []
        where = f"column {name} ({first_texts.get(name)})"
        if name not in categorical and len(found[name]) > max(FEW, len(filled) / 2):
            raise InputError(
                f"{where} has {len(found[name])} different texts in {len(filled)} rows, as names or ids have; `drop` "
                "it, name it as `id`, or name it in `categorical` if it holds categories."
            )
        TABLE_TEXTS.check(len(found[name]), f"{where} is text; correct it, or `drop` it: ")
    width = sum(len(texts) or 1 for texts in found.values())
    TABLE_NUMBERS.check(len(rows) * width, "`drop` text columns, or use an .npz file for large data: ")
    return found


def find_labels(tables: Mapping[str, Table], frames: "Mapping[str, DataFrame]", label: str) -> dict[str, str]:
    """The labels, and where each occurs first.

    Args:
        tables: The clients' tables.
        frames: Their rows.
        label: The column.

    Raises:
        InputError: A cell is empty, or there are too many labels to be classes.
    """
    found: dict[str, str] = {}
    for key, frame in frames.items():
        for line, text in frame[label].drop_duplicates().items():
            where = f"{tables[key].name}, line {line}"
            if not isinstance(text, str):
                raise InputError(
                    f"{where}: the label column {label} is empty, or has a word for that such as NA; fill it in or "
                    "delete the row."
                )
            found.setdefault(text, where)
            TABLE_CLASSES.check(len(found), f"{where}: column {label} is no column of classes: ")
    return found


def note_order(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """That columns are matched by name, where their order differs.

    Args:
        columns: By table.

    Returns:
        One sentence, or none.

    >>> note_order({"a.csv": ["age", "sex"], "b.csv": ["sex", "age"]})
    ['columns are matched by name: b.csv have them in another order than a.csv.']
    """
    (reference, first), *others = columns.items()
    found = [
        table
        for table, own in others
        if [name for name in own if name in first] != [name for name in first if name in own]
    ]
    if not found:
        return []
    listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
    return [f"columns are matched by name: {listed} have them in another order than {reference}."]

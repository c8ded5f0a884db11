"""What a cell says: nothing, a number, or a text."""

import unicodedata
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from fedunfold.data.importers.csv import Table

NEEDS_PANDAS = "tables need pandas; run: pip install 'fedunfold[tables]'"
# What an empty cell may say, in any case of its letters.
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")
FEW = 20
"""So many different texts or whole numbers may be categories without being called so."""
WHOLE = r"([+-]?\d+)\.0*"
"""A whole number with a point, of which only the digits before it count: a spreadsheet writes 63 as 63.0."""


def strip(cells: "Series") -> "Series":
    """Texts as they are compared: no blanks around them, 63.0 is 63, and NaN for a word that means a missing cell."""
    stripped = cells.astype(str).str.strip()
    kept = stripped.mask(cells.isna() | stripped.str.lower().isin(MISSING))
    return kept.str.replace(rf"^{WHOLE}$", r"\1", regex=True)


def parse(cells: "Series") -> "tuple[Series, Series]":
    """(the cells as numbers, NaN where one is none; those that are neither numbers nor missing, without blanks)."""
    if cells.dtype.kind in "iuf":
        return cells.astype(float), cells[:0]
    pandas = import_extra("pandas", NEEDS_PANDAS)
    present = cells.astype(str).str.strip()
    present = present[~(cells.isna() | present.str.lower().isin(MISSING))]
    numbers = pandas.to_numeric(present, errors="coerce")
    return numbers.reindex(cells.index).astype(float), present[numbers.isna()]


def is_number(text: str) -> bool:
    """Whether a text is read as a number.

    >>> is_number("1e3"), is_number("1_000"), is_number("fifty")
    (True, False, False)
    """
    try:
        return "_" not in text and float(text) == float(text)
    except ValueError:
        return False


def alike_spellings(texts: Sequence[str]) -> list[list[str]]:
    """Groups of texts that differ by case, blanks or how letters are encoded only.

    >>> alike_spellings(["Yes", "no", "YES", "ST-T  wave", "st-t wave "])
    [['Yes', 'YES'], ['ST-T  wave', 'st-t wave ']]
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", text).casefold().split()), []).append(text)
    return [group for group in groups.values() if len(group) > 1]


def read_rows(
    table: "Table", names: Sequence[str], targets: Sequence[str], texts: Collection[str], *, typos: Collection[str] = ()
) -> "DataFrame":
    """All rows of a table.

    Args:
        table: The table.
        names: The feature columns.
        targets: Columns that are read as texts besides.
        texts: The feature columns that are texts; the others are numbers.
        typos: Columns of numbers in which what is none becomes a missing cell.

    Returns:
        Texts and numbers by column, NaN for gaps; the index is the line.

    Raises:
        InputError: There is no row, or a cell is no number or not finite where there should be one.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    blocks = []
    for block in table.blocks([*targets, *names], {*targets, *texts}):
        columns = {name: strip(block[name]) for name in (*targets, *texts)}
        for name in names:
            if name in texts:
                continue
            columns[name], others = parse(block[name])
            for line, text in others.items() if name not in typos else ():  # only in a test table
                raise InputError(f"{table.name}, line {line}, column {name}: {text!r} is no number, as at the clients.")
            for line, number in columns[name][np.isinf(columns[name])].items():
                where = f"{table.name}, line {line}, column {name}"
                raise InputError(f"{where}: {number} is not a finite number; correct it or leave the cell empty.")
        blocks.append(pandas.DataFrame(columns))
    if not sum(map(len, blocks)):
        raise InputError(f"{table.name} has a header but no row; add rows or remove the file.")
    return pandas.concat(blocks)


def read_ids(table: "Table", column: str) -> "Series":
    """The ids of a table's rows as texts, NaN where there is none; the index is the line."""
    pandas = import_extra("pandas", NEEDS_PANDAS)
    ids: Series = pandas.concat([strip(block[column]) for block in table.blocks([column], {column})])
    return ids

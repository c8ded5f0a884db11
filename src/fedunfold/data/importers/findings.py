"""What may be a mistake in tables that can be read: looked for once, when all rows are there.

Every measure has a plain threshold, said in its docstring; none of them changes the data.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.extras import import_extra
from fedunfold.data.importers.cells import FEW, NEEDS_PANDAS, alike_spellings, read_ids
from fedunfold.data.importers.csv import TEST, Table
from fedunfold.data.importers.imported import Finding

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Frames = Mapping[str, "DataFrame"]

EMPTY = 0.9  # part of a client's cells that are missing
ENOUGH = 10  # rows of a client, from which on its cells say something
SAME_ROWS = 5  # and more that two files share
CODES = re.compile(r"-9+(\.9+)?|-1|9{2,}")  # how a missing number may be written
UNIT = 10.0  # how many times as large a client's median may be
ID_NAME = re.compile(r"(?:^|[\W_])(?:id|nr|no|num|number|index|key|uuid|mrn|unnamed)(?:$|[\W_])", re.IGNORECASE)


def look_at_columns(frames: Frames, texts: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Columns that say nothing, or something else than they seem to.

    Args:
        frames: The rows of every client.
        texts: The feature columns, with the different texts of those that hold texts.

    Yields:
        A finding for each.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    together = pandas.concat(frames.values())
    for name, choices in texts.items():
        cells = together[name]
        columns = {key: frame[name] for key, frame in frames.items()}
        if cells.nunique() == 1 and not (choices and cells.isna().any()):
            value = cells.dropna().iloc[0]
            yield Finding(
                "constant", f"column {name} is {_shown(value)} in all filled rows and says nothing; `drop` it."
            )
            continue
        yield from _gaps(name, columns)
        if choices:
            yield from _spellings(name, choices)
        else:
            yield from _numbers(name, cells, columns)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else f"{value:g}"


def _gaps(name: str, columns: "Mapping[str, Series]") -> Iterator[Finding]:
    """Clients of 10 rows or more in which 90 % of the cells are missing."""
    for key, cells in columns.items():
        missing = int(cells.isna().sum())
        if len(cells) >= ENOUGH and missing >= EMPTY * len(cells):
            what = f"column {name} is empty in {missing} of the {len(cells)} rows of {key}"
            yield Finding("empty", f"{what}, which get what is usual elsewhere; fill it in, or `drop` the column.")


def _spellings(name: str, choices: Sequence[str]) -> Iterator[Finding]:
    """Texts that differ by case or blanks only."""
    for alike in alike_spellings(choices):
        listed = ", ".join(map(repr, alike))
        what = f"column {name}: {listed} differ by case or blanks only and are a feature each; write them alike."
        yield Finding("spelling", what)


def _numbers(name: str, cells: "Series", columns: "Mapping[str, Series]") -> Iterator[Finding]:
    """Ids, dates, words for missing cells and units among numbers."""
    filled = cells.dropna()
    whole = bool((filled % 1 == 0).all())
    if whole and len(filled) > FEW and _is_id(name, columns):
        what = f"column {name} has another whole number in every row, as an id has; `drop` it, or name it as `id`."
        yield Finding("id", what)
    elif whole and len(filled) > FEW and _are_dates(filled):
        what = f"column {name} has dates written as numbers, such as {filled.iloc[0]:.0f}"
        yield Finding("dates", f"{what}; write days since a fixed day instead, or `drop` it.")
    yield from _measurements(name, filled, columns)


def look_at_targets(frames: Frames, name: str) -> Iterator[Finding]:
    """The same of numbers to predict, which are there as texts: words for missing ones, and units."""
    pandas = import_extra("pandas", NEEDS_PANDAS)
    columns = {key: pandas.to_numeric(frame[name]) for key, frame in frames.items()}
    yield from _measurements(name, pandas.concat(columns.values()), columns)


def _measurements(name: str, filled: "Series", columns: "Mapping[str, Series]") -> Iterator[Finding]:
    yield from _codes(name, filled)
    if filled.nunique() <= FEW:  # a code and no measurement: one site may well have one value alone
        return
    medians = {key: float(own.median()) for key, own in columns.items() if own.notna().sum() >= ENOUGH}
    for key, median in medians.items():
        own = columns[key].dropna()
        if own.nunique() == 1:
            what = f"column {name} is {own.iloc[0]:g} in all filled rows of {key} and differs elsewhere"
            yield Finding("constant-at-client", f"{what}; leave the cells empty if it was not measured there.")
            continue
        others = [other for each, other in medians.items() if each != key]
        usual = float(np.median(others)) if others else 0.0
        if median * usual > 0 and not 1 / UNIT < median / usual < UNIT:
            what = f"column {name} has the median {median:.4g} at {key} and {usual:.4g} at the others"
            yield Finding("unit", f"{what}; if that is another unit, convert it.")


def _is_id(name: str, columns: "Mapping[str, Series]") -> bool:
    """Whole numbers of which no client has one twice, in order, close together or under a name for ids."""
    for cells in columns.values():
        own = cells.dropna()
        close = len(own) > 1 and own.max() - own.min() < 2 * len(own)
        ordered = own.is_monotonic_increasing or own.is_monotonic_decreasing
        if not own.is_unique or not (close or ordered or ID_NAME.search(name)):
            return False
    return True


def _are_dates(numbers: "Series") -> bool:
    """Whether all read as YYYYMMDD."""
    years, days = numbers // 10000, numbers % 10000
    return bool((years.between(1900, 2100) & (days // 100).between(1, 12) & (days % 100).between(1, 31)).all())


def _codes(name: str, filled: "Series") -> Iterator[Finding]:
    """-1, -9, -99, … below numbers of which none is negative; 99, 999, … that are twice as large as any other."""
    for value in {filled.min(), filled.max()}:
        count = int((filled == value).sum())
        rest = filled[filled != value]
        if count > 1 and len(rest) and CODES.fullmatch(f"{value:g}"):
            signs = value == -1 and rest.nunique() <= FEW  # -1 and 1 are a code themselves
            beyond = rest.min() >= 0 and not signs if value < 0 else value >= 2 * rest.max() > 2
            if beyond:
                what = f"column {name} has {value:g} in {count} cells, far from all others"
                yield Finding("code", f"{what}; leave the cells empty if it stands for a missing number.")


def look_at_rows(frames: Frames, test: "DataFrame | None", tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Files that share rows, and rows that a file has more than once.

    Said of files in which at least half of the rows are different ones; where more rows are alike, there are only few
    different ones to have. Reported are 5 rows or more that make up a half of the smaller file, a tenth of the test's
    file, or a twentieth of a file in which they occur again.

    Args:
        frames: The rows of every client.
        test: Those of the test set's file.
        tables: The clients' tables.

    Yields:
        A finding for each pair of files, of those that have the row first and again, and for each file.
    """
    pandas = import_extra("pandas", NEEDS_PANDAS)
    names = {key: table.name for key, table in tables.items()}
    different: dict[str, NDArray[np.uint64]] = {}
    for key, frame in {**frames, **({} if test is None else {TEST: test})}.items():
        rows = pandas.util.hash_pandas_object(frame, index=False).to_numpy()
        once = np.unique(rows)
        if len(once) < max(len(rows) / 2, SAME_ROWS):
            continue
        different[key] = once
        again = len(rows) - len(once)
        if key != TEST and again >= max(SAME_ROWS, len(rows) / 20):
            what = f"{names[key]}: {again} of {len(rows)} rows are there before already"
            yield Finding("repeated-rows", f"{what}; take them out if they are no cases of their own.")
    for (first, other), count in _shared(different).items():
        smaller = min(len(different[first]), len(different[other]))
        if other == TEST and count >= max(SAME_ROWS, len(different[other]) / 10):
            what = f"{count} of {len(different[other])} rows of the test set are rows of {names[first]} too"
            yield Finding("test-rows", f"{what}; take them out of one, or what was learned by heart is tested.")
        elif other != TEST and count >= max(SAME_ROWS, smaller / 2):
            what = f"{names[first]} and {names[other]} have {count} rows in common, of {smaller} in the smaller file"
            yield Finding("same-rows", f"{what}; take out one of the copies.")


def _shared(different: Mapping[str, NDArray[np.uint64]]) -> dict[tuple[str, str], int]:
    """How many rows each has that another had before, by (the first that has them, it)."""
    keys = list(different)
    if not keys:
        return {}
    owners = np.repeat(np.arange(len(keys)), [len(rows) for rows in different.values()])
    _, first, row = np.unique(np.concatenate(list(different.values())), return_index=True, return_inverse=True)
    pairs, counts = np.unique(np.stack([owners[first][row], owners]), axis=1, return_counts=True)
    return {(keys[a], keys[b]): int(n) for (a, b), n in zip(pairs.T, counts, strict=True) if a != b}


def look_at_classes(labels: Mapping[str, Any], classes: Sequence[str], column: str) -> Iterator[Finding]:
    """Classes that only one client has.

    Args:
        labels: The class numbers of every client.
        classes: The classes' names.
        column: The column of labels.

    Yields:
        A finding for each, where there are several clients.
    """
    held = {key: np.bincount(own, minlength=len(classes)) for key, own in labels.items()}
    for c, name in enumerate(classes):
        keys = [key for key, counts in held.items() if counts[c]]
        if len(keys) == 1 < len(held):
            what = f"class {name} of {column} is at {keys[0]} alone, in {held[keys[0]][c]} rows"
            yield Finding("sole-class", f"{what}; check that the others do not write it in another way.")


def look_at_names(table: Table) -> Iterator[Finding]:
    """Columns whose names differ by case or blanks only."""
    for alike in alike_spellings(table.columns):
        what = f"{table.name}: the columns {' and '.join(alike)} differ by case or blanks only"
        yield Finding("column-names", f"{what}; rename one, or `drop` it.")


def _counts(numbers: "Series") -> bool:
    """Whether they are consecutive."""
    return len(numbers) > 0 and bool(numbers.is_unique and numbers.max() - numbers.min() == len(numbers) - 1)


def look_at_ids(tables: Mapping[str, Table], column: str) -> Iterator[Finding]:
    """Ids that are missing, occur twice at a client, or at two, if clients do not simply count their rows."""
    owners: dict[str, tuple[str, int]] = {}
    for table in tables.values():
        if column not in table.columns:
            continue
        ids = read_ids(table, column)
        if ids.isna().any():
            where = f"{table.name}, line {ids.index[ids.isna()][0]}, column {column}"
            yield Finding(
                "id-missing", f"{where}: {int(ids.isna().sum())} of {len(ids)} rows have no id; fill them in."
            )
        known = ids.dropna()
        twice = known[known.duplicated()]
        if len(twice):
            first = f"{table.name}, line {twice.index[0]}"
            where = f"{first}: {len(twice)} of {len(ids)} ids are there before, first {twice.iloc[0]}"
            yield Finding("id-twice", f"{where}; rows of one id may come into training and test: give a `test` file.")
        if known.str.fullmatch(r"\d{1,9}").all() and _counts(known.astype(int)):
            continue
        again = [(line, text) for line, text in known.items() if text in owners]
        if again:
            line, text = again[0]
            other, at = owners[text]
            where = f"{table.name}, line {line}: {len(again)} of {len(ids)} ids are in other files too, first {text}"
            yield Finding("id-elsewhere", f"{where} ({other}, line {at}); take out one if it is the same case.")
        for line, text in known.items():
            owners.setdefault(text, (table.name, line))

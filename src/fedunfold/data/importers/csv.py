"""A folder of CSV files, one for each client, read by pandas after every line was checked.

pandas fills up short rows silently and does not know line numbers, so Python's `csv` looks at each row first.
"""

import csv
import itertools
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.data.importers.imported import client_keys
from fedunfold.data.npz import first_line
from fedunfold.data.vision.images import visible_entries
from fedunfold.io.limits import LINE_BYTES

if TYPE_CHECKING:
    from pandas import DataFrame

TEST = "test"
LABELS = ("label", "y", "target", "class")
BLOCK_CELLS = 1 << 20  # read at once
NEEDS_PANDAS = "tables need pandas; run: pip install 'fedunfold[tables]'"
MISSING = ("", "na", "n/a", "nan", "null", "?")  # what an empty cell may say, in any case of its letters


class Table(Protocol):
    """Rows of text cells under named columns.

    Attributes:
        name: What messages call it, such as its path.
        columns: The names of its columns.
    """

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> "Iterator[DataFrame]":
        """Some rows at a time.

        Args:
            columns: Those that are needed.
            texts: Those of them that are not to be read as numbers.

        Yields:
            Numbers or texts by column, NaN for missing cells; the index is the line of each row, for messages.
        """


@dataclass(frozen=True)
class CsvTable:
    """A UTF-8 file with a header; its cells are separated as the header's are, by commas, semicolons or tabs.

    Attributes:
        path: The file.
    """

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        columns = tuple(cell.strip() for cell in next(self._records(), (1, []))[1])
        if not any(columns):
            raise InputError(f"{self.name} is empty; give it a header and at least one row.")
        for position, column in enumerate(columns):
            if not column:
                raise InputError(f"{self.name}: column {position + 1} has no name in the header; name it.")
            if column in columns[:position]:
                raise InputError(f"{self.name}: the header has two columns {column}; rename one.")
        return columns

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> "Iterator[DataFrame]":
        pandas = import_extra("pandas", NEEDS_PANDAS)
        lines, start = self._row_lines, 0
        try:
            with pandas.read_csv(
                self.path,
                sep=self._delimiter,
                header=0,
                names=self.columns,
                usecols=columns,
                index_col=False,
                dtype=dict.fromkeys(texts, str),
                na_values=[*MISSING, *map(str.upper, MISSING), "NaN"],  # other cases are found later
                keep_default_na=False,
                encoding="utf-8-sig",
                chunksize=max(1, BLOCK_CELLS // len(self.columns)),
                low_memory=False,
            ) as reader:
                for block in reader:
                    block.index = lines[start : start + len(block)]
                    start += len(block)
                    yield block
            if start != len(lines):
                raise ValueError(f"{start} rows where there are {len(lines)}")
        except (OSError, ValueError) as error:
            raise InputError(f"{self.name} cannot be read ({first_line(error)}).") from error

    @cached_property
    def _row_lines(self) -> NDArray[np.int64]:
        """The line on which each row ends, once all have been checked."""
        lines = array("q")
        for line, cells in itertools.islice(self._records(), 1, None):
            if len(cells) != len(self.columns):
                raise InputError(
                    f"{self.name}, line {line}: has {len(cells)} cells but the header has {len(self.columns)}."
                )
            lines.append(line)
        return np.array(lines, dtype=np.int64)

    @cached_property
    def _delimiter(self) -> str:
        """The first of comma, semicolon and tab that the header has."""
        with self.path.open("rb") as file:
            header = file.readline(LINE_BYTES.value)
        return next((mark for mark in ",;\t" if mark.encode() in header), ",")

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The file's records that are not blank, with the line each ends on."""
        try:
            with self.path.open("rb") as file:
                reader = csv.reader(self._lines(file), delimiter=self._delimiter, strict=True)
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror}).") from error
        except csv.Error as error:
            raise InputError(f"{self.name}, line {reader.line_num}: is not CSV ({first_line(error)}).") from error

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        """Its lines as text; a file without line ends is no table, and must not fill the memory."""
        longest = LINE_BYTES.value
        for number, raw in enumerate(iter(lambda: file.readline(longest + 1), b""), 1):
            if len(raw) > longest:
                LINE_BYTES.check(len(raw), f"{self.name}, line {number}: ")
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{self.name}, line {number}: is not UTF-8; save the file as UTF-8.") from error


def scan_tables(folder: Path, test: Path | None = None) -> tuple[dict[str, Table], Table | None]:
    """Look for CSV files.

    Args:
        folder: Where they are; each is the client of its name.
        test: The test set's file, in place of the folder's test.csv.

    Returns:
        The clients' tables by key, and the test set's, where there is a test.csv or a file was named; nothing of them
        has been read.
    """
    files = {path.name: path for path in csv_files(folder)}
    if test is None:
        test = next((path for path in files.values() if path.stem.lower() == TEST), None)
    elif not test.is_file():
        raise InputError(f"`test`: there is no file {test}; name one, or give a fraction such as 0.2.")
    names = {name: path.stem for name, path in files.items() if test is None or not path.samefile(test)}
    if not names:
        raise InputError(f"{folder}: has no CSV file but the test's; give one for each client.")
    keys = client_keys(names, str(folder))
    return {key: CsvTable(files[name]) for key, name in keys.items()}, None if test is None else CsvTable(test)


def csv_files(folder: Path) -> list[Path]:
    """The folder's CSV files, by name."""
    return [path for path in visible_entries(folder) if path.suffix.lower() == ".csv" and path.is_file()]


def guess_label(columns: Sequence[str]) -> str:
    """The column called label, y, target or class, in any case; else the last one.

    >>> guess_label(["Age", "Target", "site"]), guess_label(["age", "died"])
    ('Target', 'died')
    """
    by_name = {column.lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in LABELS if name in by_name), columns[-1])

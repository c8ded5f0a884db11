"""A folder of CSV files, one for each client, read by pandas after every line was checked.

pandas fills up short rows silently and does not know line numbers, so Python's `csv` looks at each row first.
"""

import codecs
import csv
import itertools
import unicodedata
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
from fedunfold.data.importers.cells import MISSING, NEEDS_PANDAS, is_number
from fedunfold.data.importers.imported import Finding, client_keys
from fedunfold.data.npz import first_line
from fedunfold.data.vision.images import visible_entries
from fedunfold.io.limits import LINE_BYTES

if TYPE_CHECKING:
    from pandas import DataFrame

TEST = "test"
LABELS = ("label", "y", "target", "class")
BLOCK_CELLS = 1 << 20  # read at once
SEPARATORS = ",;\t"
OPENING_ROWS = 1000  # among which a first line that is no header is recognised
OTHER_TABLES = (".tsv", ".txt", ".dat", ".data", ".xls", ".xlsx", ".ods", ".sav", ".dta", ".parquet", ".zip", ".gz")
WORKBOOK = b"PK\x03\x04"  # how a spreadsheet's own file begins, whatever it is called


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

    def findings(self) -> "list[Finding]":
        """What is odd about how it is written, once its rows have been read."""


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
        rows = list(itertools.islice(self._records(), OPENING_ROWS))
        cells = rows[0][1] if rows else []
        columns = tuple(unicodedata.normalize("NFC", cell.strip()) for cell in cells)
        if not any(columns):
            raise InputError(f"{self.name} is empty; give it a header and at least one row.")
        if columns[0].lower().startswith("sep="):
            raise InputError(f"{self.name}, line {rows[0][0]}: is a spreadsheet's 'sep=' and no header; delete it.")
        if len(columns) == 1 and "|" in columns[0]:
            raise InputError(
                f"{self.name}: the header {columns[0][:40]!r} is a single cell; separate cells by commas, semicolons "
                "or tabs."
            )
        if _is_a_row(columns, [own for _, own in rows[1:] if own != cells]):
            raise InputError(
                f"{self.name}, line {rows[0][0]}: looks like a row of values ({', '.join(columns)[:60]}), not like the "
                "names of columns; put a header above it."
            )
        for position, column in enumerate(columns):
            if not column:
                raise InputError(
                    f"{self.name}: column {position + 1} has no name in the header; name it, or delete it if it "
                    "holds row numbers or nothing."
                )
            if column in columns[:position]:
                raise InputError(f"{self.name}: the header has two columns {column}; rename one.")
        return columns

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> "Iterator[DataFrame]":
        pandas = import_extra("pandas", NEEDS_PANDAS)
        lines, start = self._row_lines[0], 0
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

    def findings(self) -> list[Finding]:
        """Cells with line ends in them, which a quote that was forgotten makes too."""
        lines, broken = self._row_lines
        if not broken:
            return []
        where = f"{len(broken)} of {len(lines)} rows span several lines, the first from line {broken[0]}"
        what = f"{self.name}: {where}; check the quotes there, if no cell is meant to have a line end in it."
        return [Finding("line-ends", what)]

    @cached_property
    def _row_lines(self) -> tuple[NDArray[np.int64], list[int]]:
        """The line on which each row ends, once all have been checked, and where those of several lines begin."""
        lines, broken = array("q"), []
        for first, line, cells in itertools.islice(self._spans(), 1, None):
            if len(cells) != len(self.columns):
                raise InputError(
                    f"{self.name}, line {line}: has {len(cells)} cells but the header has {len(self.columns)}; fill "
                    "in or take out what is too few or too many, and put quotes around a cell that has the separator "
                    "in it."
                )
            if cells[0].strip() == self.columns[0] and tuple(map(str.strip, cells)) == self.columns:
                raise InputError(f"{self.name}, line {line}: is the header once more; delete the line.")
            lines.append(line)
            if line > first:
                broken.append(first)
        return np.array(lines, dtype=np.int64), broken

    @cached_property
    def _delimiter(self) -> str:
        """The one of comma, semicolon and tab that divides the header into the most cells."""
        with self.path.open("rb") as file:
            header = next(filter(str.strip, self._lines(file)), "")
        return max(SEPARATORS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The file's records that are not blank, with the line each ends on."""
        return ((line, cells) for _, line, cells in self._spans())

    def _spans(self) -> Iterator[tuple[int, int, list[str]]]:
        """The same, with the line each begins on too."""
        first = 1
        try:
            delimiter = self._delimiter
            with self.path.open("rb") as file:
                reader = csv.reader(self._lines(file), delimiter=delimiter, strict=True)
                for cells in reader:
                    if cells:
                        yield first, reader.line_num, cells
                    first = reader.line_num + 1
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror}).") from error
        except csv.Error as error:
            if reader.line_num > first:
                raise InputError(
                    f"{self.name}, line {first}: a quote that opens here is not closed before line {reader.line_num}; "
                    "close it, or delete it."
                ) from error
            raise InputError(
                f"{self.name}, line {first}: is not CSV ({first_line(error)}); correct its quotes."
            ) from error

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        """Its lines as text; a file without line ends is no table, and must not fill the memory."""
        longest = LINE_BYTES.value
        for number, raw in enumerate(iter(lambda: file.readline(longest + 1), b""), 1):
            if len(raw) > longest:
                LINE_BYTES.check(len(raw), f"{self.name}, line {number}: ")
            where = f"{self.name}, line {number}"
            if number == 1 and raw.startswith(WORKBOOK):
                raise InputError(f"{self.name} is a workbook or archive and no text; save the sheet as CSV (UTF-8).")
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                wide = number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                looks = "UTF-16" if wide else f"perhaps Windows-1252: {raw.decode('cp1252', 'replace').strip()[:40]!r}"
                raise InputError(f"{where}: is not UTF-8 ({looks}); save the file as UTF-8.") from error
            if "\0" in text:
                raise InputError(f"{where}: is no text, for it has a zero byte; save the file as UTF-8.")
            if "\r" in text.rstrip("\r\n"):
                raise InputError(f"{where}: has a carriage return within it; save the file with usual line ends.")
            yield text


def _is_a_row(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether every cell of the header is a number or missing, or a text that its column has again.

    Numbers counted from 0 or 1 are names, as programs give them to columns that have none.
    """
    if list(header) in ([str(i + first) for i in range(len(header))] for first in (0, 1)):
        return False
    return bool(rows) and all(
        is_number(cell) or (cell.lower() in MISSING) or any(cell == row[i].strip() for row in rows if i < len(row))
        for i, cell in enumerate(header)
    )


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


def look_at_files(folder: Path) -> Iterator[Finding]:
    """Tables in other formats beside the CSV files, which would be a client less."""
    for path in visible_entries(folder):
        if path.is_file() and path.suffix.lower() in OTHER_TABLES:
            what = f"{path} does not end in .csv and was left out"
            yield Finding("left-out", f"{what}; save it as CSV if it is a client's, or move it away.")


def guess_label(columns: Sequence[str]) -> str:
    """The column called label, y, target or class, in any case; else the last one.

    >>> guess_label(["Age", "Target", "site"]), guess_label(["age", "died"])
    ('Target', 'died')
    """
    by_name = {column.lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in LABELS if name in by_name), columns[-1])

"""A folder of CSV files, one a client, read with the standard library alone.

pandas would bring 60 MB for what two passes of `csv` do here: the first learns what the columns hold, the second
fills arrays, so that no file is ever in memory as text.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Protocol

from fedunfold.core.errors import InputError
from fedunfold.data.importers.imported import client_keys, visible
from fedunfold.data.npz import first_line

TEST = "test"
LABELS = ("label", "y", "target", "class")
LONGEST_LINE = 1 << 24  # bytes; a file without line ends is no table, and must not fill the memory


class Table(Protocol):
    """Rows of text cells under named columns; each row comes with its line, for messages."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def rows(self) -> Iterator[tuple[int, Sequence[str]]]: ...


@dataclass(frozen=True)
class CsvSheet:
    """A CSV file with a header, in UTF-8; cells are parted by what the header is: commas, semicolons or tabs."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        header = next(self._records(), (1, []))[1]
        columns = tuple(cell.strip() for cell in header)
        if not any(columns):
            raise InputError(f"{self.name} is empty; give it a header and at least one row.")
        for position, column in enumerate(columns):
            if not column:
                raise InputError(f"{self.name}: column {position + 1} has no name in the header; name it.")
            if column in columns[:position]:
                raise InputError(f"{self.name}: the header has two columns {column}; rename one.")
        return columns

    def rows(self) -> Iterator[tuple[int, Sequence[str]]]:
        width = len(self.columns)
        records = self._records()
        next(records, None)
        for line, cells in records:
            if len(cells) != width:
                raise InputError(f"{self.name}, line {line}: has {len(cells)} cells but the header has {width}.")
            yield line, cells

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The file's records that are not blank, with the line each ends on."""
        try:
            with self.path.open("rb") as file:
                first = file.readline(LONGEST_LINE)
                file.seek(0)
                reader = csv.reader(self._lines(file), delimiter=_delimiter(first), strict=True)
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror}).") from error
        except csv.Error as error:
            raise InputError(f"{self.name}, line {reader.line_num}: is not CSV ({first_line(error)}).") from error

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        number = 0
        while raw := file.readline(LONGEST_LINE):
            number += 1
            if len(raw) == LONGEST_LINE:
                raise InputError(f"{self.name}, line {number}: is longer than 16 MB, so this is no CSV file.")
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{self.name}, line {number}: is not UTF-8; save the file as UTF-8.") from error


def _delimiter(header: bytes) -> str:
    """The first of comma, semicolon and tab that the header has."""
    return next((mark for mark in ",;\t" if mark.encode() in header), ",")


@dataclass(frozen=True)
class TableFolder:
    """The clients' sheets by key, and the test's where there is a test.csv or a file was named."""

    clients: dict[str, Table]
    test: Table | None

    @classmethod
    def listed(cls, folder: Path, test: Path | None = None) -> "TableFolder":
        files = {path.name: path for path in csv_files(folder)}
        if test is None:
            test = next((path for path in files.values() if path.stem.lower() == TEST), None)
        elif not test.is_file():
            raise InputError(f"--test: there is no file {test}; name one, or give a fraction such as 0.2.")
        names = {name: path.stem for name, path in files.items() if test is None or not path.samefile(test)}
        if not names:
            raise InputError(f"{folder}: has no CSV file but the test's; give one for each client.")
        clients: dict[str, Table] = {
            key: CsvSheet(files[name]) for key, name in client_keys(names, str(folder)).items()
        }
        return cls(clients, None if test is None else CsvSheet(test))


def csv_files(folder: Path) -> list[Path]:
    """The folder's CSV files, by name."""
    return [path for path in visible(folder) if path.suffix.lower() == ".csv" and path.is_file()]


def guessed_label(columns: Sequence[str]) -> str:
    """The column called label, y, target or class, in any case; else the last one.

    >>> guessed_label(["Age", "Target", "site"]), guessed_label(["age", "died"])
    ('Target', 'died')
    """
    by_name = {column.lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in LABELS if name in by_name), columns[-1])

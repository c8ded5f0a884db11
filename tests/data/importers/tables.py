"""Three small hospitals as CSV files, and ways to spoil them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.data.importers.imported import ImportedData

COLUMNS = ["age", "sex", "pressure", "ecg", "diagnosis"]
SITES = ("basel", "budapest", "zürich")
ROWS = 40

Rows = list[list[str]]


class Hospitals:
    """Rows by site, the header first; what is written of them can be changed last.

    Attributes:
        rows: The cells of each file.
        raw: Changes of a file's bytes, by site.
        separator: What stands between cells, by site.
    """

    def __init__(self) -> None:
        stream = np.random.default_rng(3)
        self.rows: dict[str, Rows] = {}
        self.raw: dict[str, Callable[[bytes], bytes]] = {}
        self.separator: dict[str, str] = {}
        for site in SITES:
            rows = [list(COLUMNS)]
            for i in range(ROWS):
                age, pressure = stream.integers(30, 80), stream.normal(130, 15)
                ecg = ("normal", "st-t", "lvh")[stream.integers(3)]
                rows.append([str(age), "fm"[stream.integers(2)], f"{pressure:.1f}", ecg, ("no", "yes")[i % 2]])
            self.rows[site] = rows

    def set(self, site: str, line: int, column: str, cell: str) -> None:
        """Write into one cell; the header is line 1."""
        self.rows[site][line - 1][self.rows[site][0].index(column)] = cell

    def each(self, column: str, cell: Callable[[int, str], str], *sites: str) -> None:
        """Write into a column, at some sites or all: from the row's number, from 0 over all sites, and the cell."""
        for position, site in enumerate(SITES):
            at = self.rows[site][0].index(column)
            for i, row in enumerate(self.rows[site][1:] if site in (sites or SITES) else []):
                row[at] = cell(position * ROWS + i, row[at])

    def add(self, column: str, cell: Callable[[int], str], *sites: str) -> None:
        """Put a column first, at some sites or all."""
        for position, site in enumerate(SITES):
            for i, row in enumerate(self.rows[site] if site in (sites or SITES) else []):
                row.insert(0, column if i == 0 else cell(position * ROWS + i - 1))

    def write(self, folder: Path) -> Path:
        """A file for each site."""
        folder.mkdir(exist_ok=True)
        for site, rows in self.rows.items():
            text = "".join(self.separator.get(site, ",").join(row) + "\n" for row in rows)
            change = self.raw.get(site, bytes)
            (folder / f"{site}.csv").write_bytes(change(text.encode()))
        return folder


Edit = Callable[[Hospitals], Any]
Check = Callable[[ImportedData], bool]


@dataclass(frozen=True)
class Case:
    """A fault and what becomes of it.

    Attributes:
        edit: Spoils the files.
        error: Words of the refusal; none where the files are read.
        finding: The kind of the one finding, and words of it; none where there is nothing to report.
        check: What is true of the data that were read.
        same: Whether they are those of the unspoiled files.
        options: Arguments of `encode`.
        label: The column to predict.
    """

    edit: Edit
    error: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()
    check: Check = lambda made: True
    same: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    label: str = "diagnosis"


def features(*names: str) -> Check:
    """The recipe has these columns, each as often as it has features."""
    return lambda made: [entry["column"] for entry in (made.recipe or {})["features"]] == list(names)


def cells(site: str, line: int, column: str, cell: str) -> Edit:
    return lambda files: files.set(site, line, column, cell)


def every(column: str, cell: Callable[[int, str], str], *sites: str) -> Edit:
    return lambda files: files.each(column, cell, *sites)


def added(column: str, cell: Callable[[int], str], *sites: str) -> Edit:
    return lambda files: files.add(column, cell, *sites)


def written(change: Callable[[bytes], bytes], site: str = "basel") -> Edit:
    return lambda files: files.raw.update({site: change})


def separated(mark: str, *sites: str) -> Edit:
    return lambda files: files.separator.update(dict.fromkeys(sites or SITES, mark))


def both(*edits: Edit) -> Edit:
    def edit(files: Hospitals) -> None:
        for each in edits:
            each(files)

    return edit


def without_header(*sites: str) -> Edit:
    return lambda files: [files.rows[site].pop(0) for site in sites]


def other_order(files: Hospitals) -> None:
    files.rows["zürich"] = [row[::-1] for row in files.rows["zürich"]]


def without_column(files: Hospitals) -> None:
    files.rows["zürich"] = [row[1:] for row in files.rows["zürich"]]


def renamed(old: str, new: str, *sites: str) -> Edit:
    def edit(files: Hospitals) -> None:
        for site in sites or SITES:
            header = files.rows[site][0]
            header[header.index(old)] = new

    return edit


def copied(files: Hospitals) -> None:
    files.rows["zürich"] = files.rows["basel"][:1] + files.rows["basel"][6:]


def repeated(files: Hospitals) -> None:
    files.rows["basel"] += files.rows["basel"][1:11]


def trained_and_tested(files: Hospitals) -> None:
    files.rows["test"] = files.rows["basel"][:1] + files.rows["basel"][3:15] + files.rows["zürich"][3:6]


# The columns of the unspoiled files' features.
PLAIN = ("age", "sex", "sex", "pressure", "ecg", "ecg", "ecg")


def parts(made: ImportedData) -> list[tuple[Any, Any]]:
    """(x, y) of every client, and of the test set."""
    return [*made.clients.values(), made.test]

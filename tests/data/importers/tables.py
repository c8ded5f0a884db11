"""Three small hospitals as CSV files, to be spoiled by a test."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

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

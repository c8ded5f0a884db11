"""Which columns hold numbers and which texts, and what becomes of cells that do not fit.

The rule, over the filled cells of all clients:

- At least 90 % are numbers: the column holds numbers. Up to 1 % of the cells, and always one, may be none: they become
  missing and are reported; more are an error.
- Else it holds texts, each of which becomes a feature. That is reported where some are numbers, and an error where
  there are more than 20 different ones and they look like numbers, dates or ids.

Whole numbers that are written with zeros before them, such as 01067, are codes, and the column holds texts; one with
more than 20 different ones is an error, for it may be an id as well. A single such cell, or up to 1 %, is read as a
number.

A column that the user calls categorical holds texts, whatever they look like.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedunfold.core.errors import InputError
from fedunfold.data.importers.cells import FEW, parse
from fedunfold.data.importers.csv import Table
from fedunfold.data.importers.imported import Finding
from fedunfold.io.limits import TABLE_NUMBERS

if TYPE_CHECKING:
    from pandas import Series

NUMBERS = 0.9
TYPOS = 0.01
LISTED = 5  # cells that a message shows
GROUPED = r"[+-]?\d{1,3}(?:[.,'’ \u00a0\u202f]\d{3})+(?:[.,]\d+)?"
SEPARATED = re.compile(rf"[+-]?\d+,\d+|{GROUPED}")
MONTH = r"(?:jan|feb|mar|apr|may|mai|jun|jul|aug|sep|oct|okt|nov|dec|dez)[a-zäé]*\.?"
TIME = r"(?:[T ]+\d{1,2}:\d{2}.*)?"
DATE = re.compile(
    rf"(?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[. -]+{MONTH}[, -]*\d{{2,4}}|{MONTH} \d{{1,2}},? \d{{4}}){TIME}|\d{{1,2}}:\d{{2}}(?::\d{{2}})?",
    re.IGNORECASE,
)
MEASURED = re.compile(r"[<>≤≥~±≈€$£]?\s*[+\-−–]?[.,]?\d.*")  # begins like a number: 63 years, <5, −4, 120/80
LEADING_ZERO = r"0\d+"
FORMS = {"separated": SEPARATED, "date": DATE, "measured": MEASURED}


@dataclass(frozen=True)
class Cell:
    """Where a text is."""

    table: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.table}, line {self.line}: {self.text[:40]!r}"


@dataclass
class Scan:
    """What the cells of a column are, over all clients.

    Attributes:
        filled: How many are not missing.
        others: The first of those that are no numbers.
        count: How many are no numbers.
        forms: Of those, how many have each of the `FORMS`, and the first one.
        different: The different values, up to one more than `FEW`.
        whole: Whether all numbers among them are whole.
        zeros: How many are whole numbers with a zero before them, and the first one; counted of whole numbers alone.
    """

    filled: int = 0
    others: list[Cell] = field(default_factory=list)
    count: int = 0
    forms: dict[str, tuple[int, Cell]] = field(default_factory=dict)
    different: set[str | float] = field(default_factory=set)
    whole: bool = True
    zeros: tuple[int, Cell | None] = (0, None)

    def add(self, cells: "Series", table: str) -> None:
        """Take note of some cells."""
        numbers, others = parse(cells)
        self.filled += int(numbers.notna().sum()) + len(others)
        self.count += len(others)
        self.others += [Cell(table, line, text) for line, text in others[:LISTED].items()][: LISTED - len(self.others)]
        self.whole = self.whole and bool((numbers.dropna() % 1 == 0).all())
        different = others.value_counts(sort=False)  # in the order of their first cells
        if len(self.different) <= FEW:
            self.different.update(numbers.dropna().unique()[: FEW + 1].tolist(), different.index[: FEW + 1])
        for form, pattern in FORMS.items() if len(others) else ():
            found = different[different.index.str.fullmatch(pattern)]
            if len(found):
                line = (others == found.index[0]).idxmax()
                count, first = self.forms.get(form, (0, Cell(table, line, found.index[0])))
                self.forms[form] = count + int(found.sum()), first

    def add_zeros(self, cells: "Series", table: str) -> None:
        """Take note of the same cells as texts, of which numbers have lost the zeros before them."""
        if cells.dtype.kind in "iufb":  # of a source that has types: written as numbers
            return
        texts = cells.dropna().astype(str).str.strip()
        found = texts[texts.str.fullmatch(LEADING_ZERO)]
        if len(found):
            count, first = self.zeros
            self.zeros = count + len(found), first or Cell(table, found.index[0], found.iloc[0])

    @property
    def most_typos(self) -> float:
        """So many cells may be written otherwise than the rest."""
        return max(1, TYPOS * self.filled)

    def part(self, form: str) -> float:
        """The part of the filled cells that has a form."""
        return self.forms[form][0] / self.filled if form in self.forms else 0.0


@dataclass(frozen=True)
class ColumnKinds:
    """What the feature columns hold.

    Attributes:
        texts: Those of texts, with the first text of each.
        typos: Columns of numbers in which some cells are none.
        findings: What was decided that may be a mistake.
    """

    texts: Mapping[str, str]
    typos: frozenset[str]
    findings: tuple[Finding, ...]


def column_kinds(tables: Sequence[Table], names: Sequence[str], categorical: Collection[str]) -> ColumnKinds:
    """Decide what columns hold.

    Args:
        tables: Those of the clients.
        names: The feature columns.
        categorical: Columns of texts, whatever they look like.

    Returns:
        The decision.

    Raises:
        InputError: A column is neither; the message says what to do about it.
    """
    scans = _scan(tables, names)
    whole = [
        name for name, scan in scans.items() if scan.whole and scan.filled > scan.count and name not in categorical
    ]
    for table in tables if whole else ():
        for block in table.blocks(whole, whole):
            for name in whole:
                scans[name].add_zeros(block[name], table.name)
    texts: dict[str, str] = {}
    typos: set[str] = set()
    findings: list[Finding] = []
    for name, scan in scans.items():
        if name in categorical:
            texts[name] = str(scan.others[0]) if scan.others else tables[0].name
            continue
        findings += _codes(name, scan)
        if scan.zeros[0] > scan.most_typos:
            texts[name] = str(scan.zeros[1])
        elif not scan.count:
            continue
        elif scan.filled - scan.count >= NUMBERS * scan.filled:
            typos.add(name)
            findings.append(_typos(name, scan))
        else:
            texts[name] = str(scan.others[0])
            findings += _odd_texts(name, scan)
    return ColumnKinds(texts, frozenset(typos), tuple(findings))


def _scan(tables: Sequence[Table], names: Sequence[str]) -> dict[str, Scan]:
    scans = {name: Scan() for name in names}
    total = 0
    for table in tables:
        for block in table.blocks(names, ()):
            total += len(block)
            TABLE_NUMBERS.check(total * len(names), f"{table.name}: use an .npz file for large data: ")
            for name in names:
                scans[name].add(block[name], table.name)
    return scans


def _codes(name: str, scan: Scan) -> list[Finding]:
    """Whole numbers with zeros before them; refuses those that may be ids."""
    count, first = scan.zeros
    if not count:
        return []
    begin = "begins with a zero" if count == 1 else "begin with a zero"
    what = f"column {name}: {count} of {scan.filled} filled cells {begin} ({first})"
    if count <= scan.most_typos:
        return [Finding("leading-zeros", f"{what} and {_are(count)} read as a number; correct what is none.")]
    remedy = "write them without it if they are numbers"
    if len(scan.different) > FEW:
        raise InputError(
            f"{what}, as postcodes and ids do; `drop` the column, name it as `id`, name it in `categorical` if it "
            f"holds categories, or {remedy}."
        )
    return [
        Finding("leading-zeros", f"{what}, as codes do, so each text is a feature; {remedy}, or `drop` the column.")
    ]


def _typos(name: str, scan: Scan) -> Finding:
    """Cells that become missing; refuses more than a few, and numbers that are only written otherwise."""
    _refuse_separators(name, scan)
    listed = "; ".join(map(str, scan.others)) + ("; …" if scan.count > len(scan.others) else "")
    what = f"column {name}: {scan.count} of {scan.filled} filled cells {_are(scan.count)} no number ({listed})"
    if scan.count > scan.most_typos:
        raise InputError(f"{what}; correct or empty them, or name the column in `categorical` if it holds categories.")
    return Finding("no-number", f"{what} and {_are(scan.count)} taken for missing; correct or empty what is wrong.")


def _odd_texts(name: str, scan: Scan) -> list[Finding]:
    """Texts that may be no categories; refuses those that cannot be meant so."""
    _refuse_separators(name, scan)
    remedy = "or name the column in `categorical` if it holds categories"
    if scan.part("date") >= 0.5:
        raise InputError(
            f"column {name} holds dates or times ({scan.forms['date'][1]}); make them numbers, such as days since a "
            "fixed day, or `drop` the column."
        )
    numbers = scan.filled - scan.count
    measured = scan.part("measured") >= 0.5
    if not numbers and not measured:
        return []
    what = f"column {name}: {scan.count} of {scan.filled} filled cells are no bare number ({scan.others[0]})"
    if len(scan.different) > FEW:
        raise InputError(f"{what}; write numbers alone, without units or signs, {remedy}.")
    kind = "like-numbers" if measured else "mixed"
    return [Finding(kind, f"{what}, so each text is a feature; write numbers alone, {remedy}.")]


def _refuse_separators(name: str, scan: Scan) -> None:
    if "separated" in scan.forms:
        count, first = scan.forms["separated"]
        raise InputError(
            f"column {name} ({first}) has decimal commas or thousands separators in {count} of {scan.filled} cells; "
            "write numbers as 1234.5, or name the column in `categorical` if it holds categories."
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"

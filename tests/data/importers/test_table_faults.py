"""What may be wrong with tables, one fault a case: refused with its place, reported, or read as it is meant; none is
passed over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.data.importers.csv import scan_tables
from fedunfold.data.importers.imported import ImportedData
from fedunfold.data.importers.tabular import encode
from tests.data.importers.tables import ROWS, SITES, Hospitals

pytest.importorskip("pandas", reason="the extra 'tables' is not installed")

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

    edit: Callable[[Hospitals], Any]
    error: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()
    check: Check = lambda made: True
    same: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    label: str = "diagnosis"


def features(*names: str) -> Check:
    """The recipe has these columns, each as often as it has features."""
    return lambda made: [entry["column"] for entry in (made.recipe or {})["features"]] == list(names)


def cells(site: str, line: int, column: str, cell: str) -> Callable[[Hospitals], None]:
    return lambda files: files.set(site, line, column, cell)


def every(column: str, cell: Callable[[int, str], str], *sites: str) -> Callable[[Hospitals], None]:
    return lambda files: files.each(column, cell, *sites)


def added(column: str, cell: Callable[[int], str], *sites: str) -> Callable[[Hospitals], None]:
    return lambda files: files.add(column, cell, *sites)


def written(change: Callable[[bytes], bytes], site: str = "basel") -> Callable[[Hospitals], None]:
    return lambda files: files.raw.update({site: change})


def separated(mark: str, *sites: str) -> Callable[[Hospitals], None]:
    return lambda files: files.separator.update(dict.fromkeys(sites or SITES, mark))


def both(*edits: Callable[[Hospitals], Any]) -> Callable[[Hospitals], None]:
    def edit(files: Hospitals) -> None:
        for each in edits:
            each(files)

    return edit


def without_header(*sites: str) -> Callable[[Hospitals], None]:
    return lambda files: [files.rows[site].pop(0) for site in sites]


def other_order(files: Hospitals) -> None:
    files.rows["zürich"] = [row[::-1] for row in files.rows["zürich"]]


def without_column(files: Hospitals) -> None:
    files.rows["zürich"] = [row[1:] for row in files.rows["zürich"]]


def renamed(old: str, new: str, *sites: str) -> Callable[[Hospitals], None]:
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


PLAIN = ("age", "sex", "sex", "pressure", "ecg", "ecg", "ecg")

NUMBERS = {
    "nothing is wrong": Case(lambda files: None, same=True),
    "a typo in a number": Case(
        cells("basel", 5, "age", "fifty"),
        finding=("no-number", "column age", "1 of 120", "basel.csv, line 5: 'fifty'", "missing"),
        check=features(*PLAIN),
    ),
    "typos in two cells of a hundred and twenty": Case(
        both(cells("basel", 5, "age", "fifty"), cells("zürich", 9, "age", "old")),
        error=("column age", "2 of 120", "basel.csv, line 5: 'fifty'", "zürich.csv, line 9: 'old'", "`categorical`"),
    ),
    "a column with texts that is called categorical": Case(
        both(every("age", lambda i, _: str(40 + i % 3)), cells("basel", 5, "age", "old"), cells("basel", 6, "age", "")),
        options={"categorical": ["age"]},
        check=features("age", "age", "age", "age", *PLAIN[1:]),
    ),
    "63, 63.0 and blanks are one number": Case(
        every("age", lambda i, cell: (cell, f"{cell}.0", f" {cell} ", f"+{cell}")[i % 4]), same=True
    ),
    "63, 63.0 and blanks are one category": Case(
        every("age", lambda i, cell: ("63", "63.0", " 63 ", "64.")[i % 4]),
        options={"categorical": ["age"]},
        check=features("age", "age", *PLAIN[1:]),
    ),
    "decimal commas in quotes": Case(
        every("pressure", lambda i, cell: f'"{cell.replace(".", ",")}"'),
        error=("column pressure", "basel.csv, line 2", "decimal commas", "1234.5"),
    ),
    "decimal commas between semicolons": Case(
        both(separated(";"), every("pressure", lambda i, cell: cell.replace(".", ","), "zürich")),
        error=("column pressure", "zürich.csv, line 2", "decimal commas", "40 cells"),
    ),
    "one decimal comma": Case(
        cells("basel", 7, "pressure", '"1,5"'), error=("column pressure", "basel.csv, line 7: '1,5'", "1 cells")
    ),
    "thousands with commas": Case(cells("basel", 7, "age", '"1,234"'), error=("column age", "line 7", "thousands")),
    "thousands with spaces": Case(cells("basel", 7, "age", "1 234"), error=("column age", "line 7", "thousands")),
    "thousands with apostrophes": Case(cells("basel", 7, "age", "1'234"), error=("column age", "thousands")),
    "thousands with points": Case(
        cells("basel", 7, "age", "1.234.567"), error=("column age", "line 7: '1.234.567'", "thousands")
    ),
    "dates": Case(
        added("seen", lambda i: f"2020-0{1 + i % 9}-1{i % 10}"),
        error=("column seen", "dates", "basel.csv, line 2: '2020-01-10'", "`drop`"),
    ),
    "dates with points": Case(added("seen", lambda i: f"1{i % 10}.3.2020"), error=("column seen", "dates")),
    "dates with names of months": Case(added("seen", lambda i: f"{1 + i % 28} March 2020"), error=("seen", "dates")),
    "dates with times": Case(added("seen", lambda i: f"2020-03-1{i % 10} 12:30:00"), error=("column seen", "dates")),
    "times": Case(added("seen", lambda i: f"{i % 24}:30"), error=("column seen", "times", "'0:30'")),
    "dates that are dropped": Case(
        added("seen", lambda i: f"2020-03-1{i % 10}"), options={"drop": ["seen"]}, same=True
    ),
    "dates as numbers": Case(
        added("seen", lambda i: f"2020{1 + i % 12:02d}{1 + i % 28:02d}"), finding=("dates", "column seen", "20200101")
    ),
    "units beside numbers": Case(
        every("pressure", lambda i, cell: f"{cell} mmHg"), error=("column pressure", "mmHg", "units", "`categorical`")
    ),
    "pairs of numbers": Case(every("pressure", lambda i, cell: f"{100 + i}/80"), error=("column pressure", "/80")),
    "a number below a limit": Case(
        cells("basel", 3, "pressure", "<90"), finding=("no-number", "column pressure", "line 3: '<90'")
    ),
    "another sign for minus": Case(
        cells("basel", 3, "pressure", "−4"), finding=("no-number", "column pressure", "line 3: '−4'")
    ),
    "groups of ages": Case(
        every("age", lambda i, cell: f"{cell[0]}0-{cell[0]}9"),
        finding=("like-numbers", "column age", "each text is a feature", "`categorical`"),
    ),
    "groups of ages that are called categorical": Case(
        every("age", lambda i, cell: f"{cell[0]}0-{cell[0]}9"),
        options={"categorical": ["age"]},
        check=features(*["age"] * 5, *PLAIN[1:]),
    ),
    "codes and words": Case(
        every("age", lambda i, cell: "unknown" if i % 3 == 0 else str(i % 4)),
        finding=("mixed", "column age", "40 of 120", "basel.csv, line 2: 'unknown'"),
    ),
    "many numbers and words": Case(
        every("age", lambda i, cell: "unknown" if i % 3 == 0 else cell), error=("column age", "40 of 120", "'unknown'")
    ),
    "infinity": Case(cells("basel", 3, "pressure", "inf"), error=("basel.csv, line 3, column pressure", "inf")),
    "a number for missing ones": Case(
        every("age", lambda i, cell: "-9" if i % 20 == 0 else cell), finding=("code", "column age", "-9 in 6 cells")
    ),
    "a large number for missing ones": Case(
        every("age", lambda i, cell: "999" if i % 20 == 0 else cell), finding=("code", "column age", "999 in 6 cells")
    ),
    "another unit at one site": Case(
        every("pressure", lambda i, cell: f"{float(cell) * 133:.0f}", "zürich"),
        finding=("unit", "column pressure", "zürich", "convert"),
    ),
    "indicators of missing numbers": Case(
        both(cells("basel", 3, "age", ""), cells("zürich", 4, "age", "?"), cells("basel", 4, "ecg", "")),
        options={"missing_indicators": True},
        check=lambda made: features("age", *PLAIN)(made) and sum(x[:, 1].sum() for x, _ in _all(made)) == 2,
    ),
}

COLUMNS = {
    "a constant column": Case(added("ward", lambda i: "icu"), finding=("constant", "column ward", "'icu'", "`drop`")),
    "a constant number": Case(added("dose", lambda i: "5"), finding=("constant", "column dose is 5", "`drop`")),
    "a number that is constant at one site": Case(
        every("pressure", lambda i, cell: "0", "zürich"),
        finding=("constant-at-client", "column pressure is 0", "zürich", "empty"),
    ),
    "a column that is nearly empty at one site": Case(
        every("pressure", lambda i, cell: cell if i % 20 == 0 else "", "zürich"),
        finding=("empty", "column pressure", "38 of the 40 rows of zürich", "`drop`"),
    ),
    "a column that is empty everywhere": Case(added("dose", lambda i: ""), error=("column dose", "empty", "`drop`")),
    "a number for each row": Case(
        added("patient", lambda i: str(i + 1)), finding=("id", "column patient", "`drop`", "`id`")
    ),
    "numbers under a name for ids": Case(
        added("patient_id", lambda i: str(7919 * (i + 1) % 10007)), finding=("id", "column patient_id")
    ),
    "a text for each row": Case(
        added("patient", lambda i: f"P{i:03d}"),
        error=("column patient", "basel.csv, line 2: 'P000'", "120 different texts", "`drop`", "`id`"),
    ),
    "ids that are called so": Case(
        added("patient", lambda i: f"P{i:03d}"),
        options={"id": "patient"},
        same=True,
        check=lambda made: (made.recipe or {})["id"] == "patient",
    ),
    "an id twice": Case(
        added("patient", lambda i: f"P{max(i, 1):03d}"),
        options={"id": "patient"},
        finding=("id-twice", "basel.csv, line 3: the id P001", "test"),
    ),
    "an id at two sites": Case(
        added("patient", lambda i: f"P{1 if i == 100 else i:03d}"),
        options={"id": "patient"},
        finding=("id-elsewhere", "zürich.csv, line 22", "P001", "basel.csv, line 3"),
    ),
    "rows that every site counts from one": Case(
        added("patient", lambda i: str(1 + i % ROWS)), options={"id": "patient"}, same=True
    ),
    "a missing id": Case(
        added("patient", lambda i: f"P{i:03d}" if i != 50 else ""),
        options={"id": "patient"},
        finding=("id-missing", "budapest.csv, line 12", "1 rows"),
    ),
    "texts in two spellings": Case(
        every("ecg", lambda i, cell: cell.upper(), "zürich"),
        finding=("spelling", "column ecg", "'LVH', 'lvh'"),
    ),
    "texts with blanks around them": Case(every("ecg", lambda i, cell: f" {cell} "), same=True),
    "two columns whose names differ by case": Case(
        added("Age", lambda i: str(i % 7)), finding=("column-names", "Age and age", "rename")
    ),
    "a column to drop that is not there": Case(
        lambda files: None, options={"drop": ["weight"]}, error=("`drop`", "weight")
    ),
    "categories that are not there": Case(
        lambda files: None, options={"categorical": ["weight"]}, error=("`categorical`", "weight")
    ),
    "an id that is not there": Case(lambda files: None, options={"id": "patient"}, error=("`id`", "patient")),
    "an id that is the label": Case(lambda files: None, options={"id": "diagnosis"}, error=("`id`", "label")),
}

LABELS = {
    "labels that differ by case": Case(
        every("diagnosis", lambda i, cell: cell.upper(), "zürich"),
        error=("column diagnosis", "'no' (", "basel.csv, line 2", "'NO' (", "zürich.csv, line 2", "`categorical`"),
    ),
    "labels with blanks around them": Case(every("diagnosis", lambda i, cell: f"{cell}  ", "zürich"), same=True),
    "labels with blanks within": Case(
        every("diagnosis", lambda i, cell: f"{cell} " + ("  x" if i % 3 else "x")), error=("'no x'", "'no   x'")
    ),
    "spellings that are classes": Case(
        cells("basel", 2, "diagnosis", "NO"),
        options={"categorical": ["diagnosis"]},
        finding=("sole-class", "class NO"),
        check=lambda made: made.classes == ("NO", "no", "yes"),
    ),
    "measurements as labels": Case(
        lambda files: None, label="age", error=("column age", "whole numbers", "regression", "`categorical`")
    ),
    "measurements as targets": Case(
        lambda files: None,
        label="age",
        options={"task": fu.regression()},
        check=lambda made: made.classes == () and made.test[1].dtype == np.float32,
    ),
    "whole numbers that are classes": Case(
        every("age", lambda i, cell: str(20 + i % 24)),
        label="age",
        options={"categorical": ["age"]},
        check=lambda made: len(made.classes) == 24,
    ),
    "fractions as labels": Case(
        lambda files: None,
        label="pressure",
        error=("basel.csv, line 2", "column pressure", "measurement", "regression"),
    ),
    "numbers and words as labels": Case(
        every("diagnosis", lambda i, cell: str(int(cell == "yes")), "zürich"),
        error=("column diagnosis", "numbers", "zürich.csv, line 2", "no: ", "basel.csv, line 2", "alike"),
    ),
    "a class at one site": Case(
        every("diagnosis", lambda i, cell: "dead" if i % 4 == 0 else cell, "zürich"),
        finding=("sole-class", "class dead", "zürich alone", "10 rows"),
    ),
    "a label for each row": Case(
        every("diagnosis", lambda i, cell: f"case {i}"), error=("column diagnosis", "120 different labels", "`label`")
    ),
    "one label": Case(every("diagnosis", lambda i, cell: "no"), error=("column diagnosis", "only the value no")),
    "an empty label": Case(
        cells("basel", 9, "diagnosis", ""), error=("basel.csv, line 9", "label column diagnosis is empty")
    ),
    "the positive label": Case(
        lambda files: None, options={"positive": "no"}, check=lambda made: made.classes == ("yes", "no")
    ),
    "a positive label that is none": Case(
        lambda files: None, options={"positive": "ill"}, error=("`positive`", "ill", "no, yes")
    ),
    "a positive label of three": Case(
        lambda files: None, label="ecg", options={"positive": "lvh"}, error=("`positive`", "lvh, normal, st-t")
    ),
    "a positive label of a regression": Case(
        lambda files: None,
        label="age",
        options={"positive": "63", "task": fu.regression()},
        error=("`positive`", "regression"),
    ),
}

FILES = {
    "no header at one site": Case(
        without_header("budapest"), error=("budapest.csv, line 1", "row of values", "header")
    ),
    "no header anywhere": Case(without_header(*SITES), error=("basel.csv, line 1", "row of values", "header")),
    "the header again": Case(
        lambda files: files.rows["basel"].insert(20, list(files.rows["basel"][0])),
        error=("basel.csv, line 21", "header once more"),
    ),
    "two columns of a name": Case(renamed("sex", "age"), error=("basel.csv", "two columns age")),
    "a column without a name": Case(added("", str, "basel"), error=("basel.csv: column 1 has no name", "row numbers")),
    "columns in another order": Case(
        other_order, same=True, check=lambda made: "zürich.csv have them in another order" in " ".join(made.notes)
    ),
    "a column that one site lacks": Case(without_column, error=("zürich.csv has no column age", "add it", "`drop`")),
    "a column of another name": Case(
        renamed("age", "Age", "budapest"), error=("budapest.csv has no column age", "rename its column 'Age'")
    ),
    "a column in decomposed letters": Case(
        both(renamed("sex", "größe"), renamed("größe", "gro\u0308ße", "basel")),
        check=features("age", "größe", "größe", *PLAIN[3:]),
    ),
    "semicolons": Case(separated(";", "zürich"), same=True),
    "tabs": Case(separated("\t", "zürich"), same=True),
    "pipes": Case(separated("|"), error=("basel.csv", "single cell", "commas, semicolons or tabs")),
    "spaces": Case(separated(" "), error=("no column diagnosis",)),
    "a comma in the header of semicolons": Case(
        both(separated(";"), renamed("age", '"age, in years"')),
        check=features("age, in years", *PLAIN[1:]),
    ),
    "a spreadsheet's first line": Case(written(lambda text: b"sep=,\n" + text), error=("basel.csv, line 1", "sep=")),
    "a byte order mark": Case(written(lambda text: b"\xef\xbb\xbf" + text), same=True),
    "Latin-1": Case(
        written(lambda text: text.replace(b"normal", "größer".encode("latin-1"), 1)),
        error=("basel.csv, line ", "not UTF-8", "größer"),
    ),
    "UTF-16": Case(
        written(lambda text: text.decode().encode("utf-16")), error=("basel.csv, line 1", "UTF-16", "save the file")
    ),
    "UTF-16 without a mark": Case(
        written(lambda text: text.decode().encode("utf-16-le")), error=("line 1", "zero byte")
    ),
    "a workbook": Case(written(lambda text: b"PK\x03\x04" + text), error=("basel.csv", "workbook", "CSV")),
    "Windows line ends": Case(written(lambda text: text.replace(b"\n", b"\r\n")), same=True),
    "old line ends": Case(
        written(lambda text: text.replace(b"\n", b"\r")), error=("basel.csv, line 1", "carriage return", "line ends")
    ),
    "no line end at the end, and blank lines": Case(
        written(lambda text: text.rstrip().replace(b"\n", b"\n\n")), same=True
    ),
    "a quote that does not close": Case(
        cells("basel", 7, "ecg", '"normal'), error=("basel.csv, line 7", "quote", "not closed before line 41")
    ),
    "a quote that closes in another row": Case(
        both(cells("basel", 7, "sex", '"f'), cells("basel", 9, "sex", 'm"')),
        finding=("line-ends", "basel.csv", "1 rows", "line 7"),
    ),
    "a quote within a cell": Case(cells("basel", 7, "ecg", '"nor"mal'), error=("basel.csv, line 7", "CSV", "quotes")),
    "too few cells": Case(
        lambda files: files.rows["basel"][4].pop(), error=("basel.csv, line 5", "4 cells", "header has 5")
    ),
    "too many cells": Case(
        lambda files: files.rows["basel"][4].append("x"), error=("basel.csv, line 5", "6 cells", "header has 5")
    ),
    "an empty file": Case(written(lambda text: b""), error=("basel.csv is empty",)),
    "a header and no row": Case(written(lambda text: text.split(b"\n")[0]), error=("basel.csv", "no row")),
    "a copied file": Case(
        copied, finding=("same-rows", "basel.csv and ", "zürich.csv have 35 rows in common", "of 35")
    ),
    "rows that are there twice": Case(repeated, finding=("repeated-rows", "basel.csv: 10 of 50 rows")),
    "training rows in the test": Case(
        trained_and_tested, finding=("test-rows", "12 of 15 rows of the test", "basel.csv")
    ),
    "words for missing cells": Case(
        every("pressure", lambda i, cell: ("NA", "n/a", "?", "NULL", "#N/A", "NaN", cell)[i % 7]),
        check=lambda made: "pressure (103)" in " ".join(made.notes),
    ),
}


def _all(made: ImportedData) -> list[tuple[Any, Any]]:
    return [*made.clients.values(), made.test]


def _encode(folder: Path, case: Case) -> ImportedData:
    clients, held = scan_tables(folder)
    return encode(clients, held or 0.25, case.label, **case.options)


@pytest.fixture(scope="module")
def unspoiled(tmp_path_factory: pytest.TempPathFactory) -> ImportedData:
    return _encode(Hospitals().write(tmp_path_factory.mktemp("plain") / "sites"), Case(lambda files: None))


CASES = NUMBERS | COLUMNS | LABELS | FILES


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, tmp_path: Path, unspoiled: ImportedData) -> None:
    case, files = CASES[name], Hospitals()
    case.edit(files)
    folder = files.write(tmp_path / "sites")
    if case.error:
        with pytest.raises(InputError) as caught:
            _encode(folder, case)
        message = str(caught.value)
        assert "\n" not in message and "--" not in message
        assert [word for word in case.error if word not in message] == [], message
        return
    made = _encode(folder, case)
    found = [(finding.kind, finding.message) for finding in made.findings]
    assert {kind for kind, _ in found} == set(case.finding[:1]), found
    assert [word for word in case.finding[1:] if word not in " ".join(text for _, text in found)] == [], found
    assert list(made.clients) == list(SITES)
    assert case.check(made)
    if case.same:
        assert made.classes == unspoiled.classes
        for (x, y), (x_plain, y_plain) in zip(_all(made), _all(unspoiled), strict=True):
            order = np.argsort(
                [PLAIN.index(entry["column"]) for entry in (made.recipe or {})["features"]], kind="stable"
            )
            assert np.array_equal(x[:, order], x_plain) and np.array_equal(y, y_plain)


def test_there_are_more_than_sixty_faults() -> None:
    assert len(CASES) == sum(map(len, (NUMBERS, COLUMNS, LABELS, FILES))) > 60

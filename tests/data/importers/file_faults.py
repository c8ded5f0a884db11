"""What may be wrong with labels and with files."""

import numpy as np

import fedunfold as fu
from tests.data.importers.tables import (
    PLAIN,
    SITES,
    Case,
    added,
    both,
    cells,
    copied,
    every,
    features,
    other_order,
    renamed,
    repeated,
    separated,
    trained_and_tested,
    without_column,
    without_header,
    written,
)

LABEL_FAULTS = {
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
    "targets that stand for missing ones": Case(
        every("age", lambda i, cell: "-9" if i % 20 == 0 else cell),
        label="age",
        options={"task": fu.regression()},
        finding=("code", "column age", "-9 in 6 cells"),
    ),
    "targets in another unit": Case(
        every("age", lambda i, cell: str(12 * int(cell)), "zürich"),
        label="age",
        options={"task": fu.regression()},
        finding=("unit", "column age", "at zürich"),
    ),
    "targets that are called classes": Case(
        lambda files: None,
        label="age",
        options={"categorical": ["age"], "task": fu.regression()},
        error=("`categorical`", "age", "regression"),
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

FILE_FAULTS = {
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
        finding=("line-ends", "basel.csv", "1 of 38 rows", "line 7"),
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

"""What may be wrong with numbers and with columns."""

from tests.data.importers.tables import PLAIN, ROWS, Case, added, both, cells, every, features, parts, separated

NUMBER_FAULTS = {
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
        error=("column pressure", "zürich.csv, line 2", "decimal commas", "40 of 120 cells"),
    ),
    "one decimal comma": Case(
        cells("basel", 7, "pressure", '"1,5"'), error=("column pressure", "basel.csv, line 7: '1,5'", "1 of 120 cells")
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
    "signs": Case(added("side", lambda i: ("-1", "1", "1")[i % 3]), check=features("side", *PLAIN)),
    "a flag that one site does not have": Case(
        added("smoker", lambda i: str(int(i < 80 and i % 9 == 0))), check=features("smoker", *PLAIN)
    ),
    "another unit at one site": Case(
        every("pressure", lambda i, cell: f"{float(cell) * 133:.0f}", "zürich"),
        finding=("unit", "column pressure", "zürich", "convert"),
    ),
    "indicators of missing numbers": Case(
        both(cells("basel", 3, "age", ""), cells("zürich", 4, "age", "?"), cells("basel", 4, "ecg", "")),
        options={"missing_indicators": True},
        check=lambda made: features("age", *PLAIN)(made) and sum(x[:, 1].sum() for x, _ in parts(made)) == 2,
    ),
}

COLUMN_FAULTS = {
    "postcodes of a few places": Case(
        added("zip", lambda i: ("01067", "99084", "04109")[i % 3]),
        finding=("leading-zeros", "column zip", "80 of 120", "basel.csv, line 2: '01067'", "each text is a feature"),
        check=features("zip", "zip", "zip", *PLAIN),
    ),
    "many postcodes": Case(
        added("zip", lambda i: f"{1000 + 977 * i:05d}"),
        error=("column zip", "begin with a zero", "basel.csv, line 2: '01000'", "`drop`", "`id`", "`categorical`"),
    ),
    "many postcodes that are called categorical": Case(
        added("zip", lambda i: f"{1000 + i % 30:05d}"),
        options={"categorical": ["zip"]},
        check=features(*["zip"] * 30, *PLAIN),
    ),
    "one number with a zero before it": Case(
        cells("basel", 5, "age", "050"),
        finding=("leading-zeros", "column age", "1 of 120", "basel.csv, line 5: '050'", "read as a number"),
        check=features(*PLAIN),
    ),
    "fractions have a zero before the point": Case(
        added("dose", lambda i: f"0.{i + 100}"), check=features("dose", *PLAIN)
    ),
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
        finding=("id-twice", "basel.csv, line 3: 1 of 40 ids", "first P001", "test"),
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
        finding=("id-missing", "budapest.csv, line 12", "1 of 40 rows"),
    ),
    "texts in two spellings": Case(
        every("ecg", lambda i, cell: cell.upper(), "zürich"),
        finding=("spelling", "column ecg", "'LVH', 'lvh'"),
    ),
    "texts in decomposed letters": Case(
        every("ecg", lambda i, cell: "größe" if cell == "lvh" and i < ROWS else cell.replace("lvh", "gro\u0308ße")),
        finding=("spelling", "column ecg", "write them alike"),
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

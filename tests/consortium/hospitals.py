"""Five hospitals with scikit-learn's breast cancer data, as spreadsheets are: no two alike."""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = ("hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e")
MEASURED = 12
"""Of the data's thirty columns; the others are dropped, to keep tests quick."""
LABEL, ID, SIDE = "diagnosis", "patient", "side"
SEPARATORS = dict(zip(SITES, ",;\t,;", strict=True))
LACKS = {"hospital-c": ("mean area", "mean texture"), "hospital-d": (SIDE,)}
"""Columns that a hospital does not have."""
RARE = "both, see letter of the GP"
"""What two patients of one hospital have in a column of categories."""
NEW = 20
"""Patients who come later."""

Table = list[dict[str, str]]


def tables() -> tuple[dict[str, Table], Table]:
    """Rows by hospital, in its own order of columns, and those of new patients."""
    data, stream = load_breast_cancer(), np.random.default_rng(0)
    order = stream.permutation(len(data.target))
    names = [str(name) for name in data.feature_names[:MEASURED]]
    rows: Table = []
    for i, index in enumerate(order):
        row = {ID: f"P{stream.integers(10**6, 10**7)}"}
        row |= {name: str(value) for name, value in zip(names, data.data[index, :MEASURED], strict=True)}
        row |= {SIDE: str(stream.choice(["left", "right"])), LABEL: str(data.target_names[data.target[index]])}
        if i % 11 == 0:
            row["mean smoothness"] = ""
        rows.append(row)
    found: dict[str, Table] = {}
    new, rest = rows[:NEW], rows[NEW:]
    for k, site in enumerate(SITES):
        own = [dict(row) for row in rest[k :: len(SITES)]]
        columns = [name for name in stream.permutation([*own[0]]) if name not in LACKS.get(site, ())]
        found[site] = [{str(name): row[name] for name in columns} for row in own]
    for row in found["hospital-e"][:2]:
        row[SIDE] = RARE
    return found, new


def write(path: Path, rows: Table, separator: str = ",") -> None:
    """A CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)

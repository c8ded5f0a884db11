"""`fedunfold env new` on tables in which something is wrong: one line and exit code 2, or findings, said once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedunfold.config import Environment
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused
from tests.data.importers.tables import Hospitals

pytest.importorskip("pandas", reason="the extra 'tables' is not installed")


@pytest.fixture
def spoiled(tmp_path: Path) -> Callable[[Callable[[Hospitals], Any]], Path]:
    def write(edit: Callable[[Hospitals], Any]) -> Path:
        files = Hospitals()
        edit(files)
        return files.write(tmp_path / "sites")

    return write


Spoiled = Callable[[Callable[[Hospitals], Any]], Path]


@pytest.mark.parametrize(
    ("edit", "options", "words"),
    [
        (lambda files: files.each("age", lambda i, cell: "old" if i < 4 else cell), (), ("line 2: 'old'", "--categor")),
        (lambda files: files.each("pressure", lambda i, cell: f"{cell} mmHg"), (), ("mmHg", "--categorical")),
        (lambda files: files.add("patient", lambda i: f"P{i}"), (), ("patient", "--drop", "--id")),
        (lambda files: files.rows["basel"].pop(0), (), ("basel.csv, line 1", "header")),
        (lambda files: files.set("basel", 7, "ecg", '"normal'), (), ("basel.csv, line 7", "quote")),
        (lambda files: files.rows["zürich"][3].pop(), (), ("zürich.csv, line 4", "4 cells")),
        (lambda files: files.each("diagnosis", lambda i, cell: cell.upper(), "basel"), (), ("'NO'", "'no'")),
        (lambda files: None, ("--label", "age", "--task", "classification"), ("column age", "--categorical")),
        (lambda files: None, ("--positive", "ill"), ("--positive", "ill", "no, yes")),
        (lambda files: None, ("--categorical", "weight"), ("--categorical", "weight")),
    ],
)
def test_what_is_refused_leaves_nothing(
    fedunfold: Command,
    spoiled: Spoiled,
    tmp_path: Path,
    edit: Callable[[Hospitals], Any],
    options: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    spoiled(edit)
    refused(fedunfold("env", "new", "sites", *options), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


def test_findings_are_said_once_and_are_in_json(fedunfold: Command, spoiled: Spoiled) -> None:
    spoiled(lambda files: files.set("basel", 5, "age", "fifty"))
    made = fedunfold("env", "new", "sites")
    assert made.code == 0
    assert made.err.count("warning: ") == made.err.count("fifty") == 1
    assert "basel.csv, line 5: 'fifty'" in made.err and "fifty" not in made.out
    again = fedunfold("env", "new", "sites", "--overwrite", "--format", "json")
    assert again.err == "" and [finding["kind"] for finding in again.json["findings"]] == ["no-number"]
    assert "1 of 120" in again.json["findings"][0]["message"]


def test_a_table_of_another_format_is_not_passed_over(fedunfold: Command, spoiled: Spoiled) -> None:
    folder = spoiled(lambda files: None)
    (folder / "zürich.csv").rename(folder / "zürich.tsv")
    made = fedunfold("env", "new", "sites")
    assert made.code == 0 and "zürich.tsv does not end in .csv and was left out" in made.err


def test_many_findings_are_cut(fedunfold: Command, spoiled: Spoiled) -> None:
    def constants(files: Hospitals) -> None:
        for c in range(25):
            files.add(f"c{c}", lambda i: "5")

    spoiled(constants)
    made = fedunfold("env", "new", "sites")
    assert made.err.count("says nothing") == 20 and "5 more findings" in made.err


def test_measurements_become_a_regression(fedunfold: Command, spoiled: Spoiled) -> None:
    spoiled(lambda files: None)
    assert fedunfold("env", "new", "sites", "--label", "age", "--format", "json").json["task"] == "regression"
    asked = fedunfold(
        "env", "new", "sites", "--label", "age", "--categorical", "age", "--overwrite", "--format", "json"
    )
    assert asked.json["task"] == "classification" and len(asked.json["classes"]) > 20


def test_every_option_and_what_predictions_make_of_it(fedunfold: Command, spoiled: Spoiled) -> None:
    """Ids beside predictions, the positive class last, indicators, and names in their own letters."""

    def edit(files: Hospitals) -> None:
        files.add("patient", lambda i: f"P{i:03d}")
        files.each("pressure", lambda i, cell: "" if i % 10 == 0 else cell)
        files.each("sex", lambda i, cell: str(int(cell == "f")))

    spoiled(edit)
    options = ("--id", "patient", "--positive", "no", "--missing-indicators", "--categorical", "sex", "--drop", "age")
    made = fedunfold("env", "new", "sites", *options)
    assert made.code == 0, made.err
    env = Environment.from_toml("sites.toml")
    assert env.class_names == ("yes", "no")
    assert [client.key for client in env.clients] == ["basel", "budapest", "zürich"]
    recipe = json.loads(Path("sites.columns.json").read_text(encoding="utf-8"))
    named = [(entry["column"], entry.get("is", "gap" in entry)) for entry in recipe["features"]]
    assert named == [
        *(("sex", text) for text in "01"),
        *(("pressure", False), ("pressure", True)),
        *(("ecg", text) for text in ("lvh", "normal", "st-t")),
    ]
    assert fedunfold("run", "sites.toml", "--rounds", 2, "--out", "runs/sites").code == 0
    Path("new.csv").write_text("patient,sex,pressure,ecg\nX1,1.0,,lvh\n007, 1 ,120,normal\nX3,0,120,lvh\n")
    predicted = fedunfold("predict", "runs/sites", "new.csv", "--format", "json")
    assert predicted.code == 0 and predicted.err == ""
    assert predicted.json["columns"] == ["patient", "prediction", "probability of yes", "probability of no"]
    assert [row[0] for row in predicted.json["rows"]] == ["X1", "007", "X3"]
    Path("new.csv").write_text("patient,sex,pressure,ecg\nX1,1,120 mmHg,lvh\n")
    refused(fedunfold("predict", "runs/sites", "new.csv"), "new.csv, line 2, column pressure", "'120 mmHg'")
    Path("new.csv").write_text("sex,pressure,ecg\n1,120,lvh\n")
    assert fedunfold("predict", "runs/sites", "new.csv", "--format", "json").json["columns"][0] == "prediction"


def test_indicators_reach_the_arrays(fedunfold: Command, spoiled: Spoiled) -> None:
    spoiled(lambda files: files.each("pressure", lambda i, cell: "" if i % 10 == 0 else cell))
    assert fedunfold("env", "new", "sites", "--missing-indicators", "--drop", "age").code == 0
    with np.load("sites.npz") as arrays:
        gaps = np.concatenate([arrays[name][:, 3] for name in arrays.files if name.startswith("x_")])
    assert gaps.sum() == 12 and set(gaps.tolist()) == {0.0, 1.0}

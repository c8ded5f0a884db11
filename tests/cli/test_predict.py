"""Predictions for new rows of a table, as a site makes them after a federation was trained."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedunfold as fu
from tests.cli.conftest import Command


def write_sites(folder: Path, kind: str) -> None:
    """Two sites; the class, or the number, depends on age and sex."""
    stream = np.random.default_rng(0)
    folder.mkdir()
    for name, n in (("north", 60), ("south", 40)):
        lines = ["age,sex,outcome"]
        for _ in range(n):
            age, sex = stream.integers(20, 80), stream.choice(["f", "m"])
            score = (age - 50) / 10 + (1.5 if sex == "m" else -1.5) + stream.normal(0, 0.2)
            outcome = ("ill" if score > 0 else "well") if kind == "classes" else f"{100 + 10 * score:.2f}"
            lines.append(f"{age},{sex},{outcome}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def trained(fedunfold: Command, kind: str) -> Path:
    write_sites(Path("sites"), kind)
    assert fedunfold("env", "new", "sites", "--label", "outcome", "--yes").code == 0
    text = Path("sites.toml").read_text()
    assert fedunfold("run", "sites.toml", "--rounds", 30, "--out", "runs/sites").code == 0, text
    return Path("runs/sites")


def test_classes_by_name_with_their_probabilities(fedunfold: Command) -> None:
    run = trained(fedunfold, "classes")
    Path("new.csv").write_text("sex,comment,age\nm,tall,75\nf,,25\nm,,\n")
    done = fedunfold("predict", run, "new.csv", "--out", "predictions.csv")
    assert done.code == 0
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert [row["prediction"] for row in rows][:2] == ["ill", "well"]
    for row in rows:
        assert float(row["probability of ill"]) + float(row["probability of well"]) == pytest.approx(1)
    found = fedunfold("predict", run, "new.csv", "--format", "json").json
    assert found["columns"] == ["prediction", "probability of ill", "probability of well"]
    assert len(found["rows"]) == 3


def test_in_a_new_process_they_are_those_of_the_trained_module(fedunfold: Command) -> None:
    run = trained(fedunfold, "classes")
    env = fu.environment("sites.toml").replace(rounds=30)
    module = fu.trained_module(env, fu.run(env))
    features = json.loads(Path("sites.columns.json").read_text())["features"]
    x = []
    for age, sex in ((75, "m"), (25, "f"), (48, "f")):
        row = {"age": age, "sex": sex}
        x.append(
            [
                float(row[e["column"]] == e["is"]) if "is" in e else (row[e["column"]] - e["mean"]) / e["scale"]
                for e in features
            ]
        )
    with torch.no_grad():
        expected = module(torch.tensor(x)).softmax(1)
    Path("new.csv").write_text("sex,age\nm,75\nf,25\nf,48\n")
    command = [sys.executable, "-m", "fedunfold", "predict", str(run), "new.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = list(csv.DictReader(done.stdout.splitlines()))
    found = torch.tensor([[float(row["probability of ill"]), float(row["probability of well"])] for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    Path("short.csv").write_text("sex\nm\n")
    refused = subprocess.run([*command[:-1], "short.csv"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: short.csv has no column age, which the model was trained on; add it.\n"


def test_the_card_has_what_each_site_held_out(fedunfold: Command) -> None:
    write_sites(Path("sites"), "classes")
    assert fedunfold("env", "new", "sites", "--label", "outcome", "--yes").code == 0
    options = ("--method", "fedunfold", "--rounds", 5, "--holdout", 0.25, "--out", "ran")
    assert fedunfold("run", "sites.toml", *options).code == 0
    env = fu.environment("sites.toml").replace(rounds=5, holdout=0.25)
    result, kept = fu.run(env, "fedunfold"), env.load_held_out()
    assert kept is not None
    card = Path("ran/card.md").read_text(encoding="utf-8")
    for key, rows in zip(kept.keys, kept.sizes, strict=True):
        assert f"| {key} | {rows} | {100 * result.held_out[key]:.1f} |" in card
    assert f"Tested on the test set, {len(env.load().y_test)} rows, after the last round." in card
    checksum = json.loads(Path("ran/settings.json").read_text())["rules"]["fedunfold"]["parameters"]
    assert f"| SHA-256 of the rule's numbers | {checksum} |" in card
    assert "| method | fedunfold |" in card and "| rule | open@1 |" in card


def test_numbers_in_the_unit_of_the_column(fedunfold: Command) -> None:
    run = trained(fedunfold, "numbers")
    assert fu.environment("sites.toml").load().task == fu.regression()
    Path("new.csv").write_text("age,sex\n70,m\n30,f\n")
    rows = fedunfold("predict", run, "new.csv", "--format", "json").json["rows"]
    assert rows[0][0] == pytest.approx(135, abs=8)
    assert rows[1][0] == pytest.approx(65, abs=8)


def test_what_does_not_fit_is_said(fedunfold: Command) -> None:
    run = trained(fedunfold, "classes")
    Path("new.csv").write_text("age,sex\n70,x\n30,f\n")
    done = fedunfold("predict", run, "new.csv")
    assert done.code == 0
    assert "column sex: 1 cells have a text that no training row had, such as 'x' in line 2" in done.err
    assert done.out.splitlines()[0] == "prediction,probability of ill,probability of well"
    for text, message in (
        ("age\n70\n", "new.csv has no column sex, which the model was trained on"),
        ("age,sex\nold,m\n", "new.csv, line 2, column age: 'old' is no number"),
        ("", "new.csv is empty"),
    ):
        Path("new.csv").write_text(text)
        refused = fedunfold("predict", run, "new.csv", "--out", "refused.csv")
        assert refused.code != 0
        assert message in " ".join(refused.err.split())
        assert not Path("refused.csv").exists()
    assert fedunfold("run", "digits-label-skew", "--rounds", 1, "--out", "runs/digits").code == 0
    refused = fedunfold("predict", "runs/digits", "new.csv")
    assert refused.code != 0
    assert "did not come from a table" in " ".join(refused.err.split())
    assert "Traceback" not in refused.err
    assert fedunfold("predict", run, "absent.csv").code != 0

"""`fedunfold site`: what is typed, what is written, and one sentence where it does not fit."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.consortium.keys import write_keys
from tests.data.importers.tables import SITES, Hospitals


@pytest.fixture
def folder(fedunfold: Command) -> Path:
    """Three hospitals with keys, in the folder in which commands are typed."""
    Hospitals().write(Path())
    for site in SITES:
        write_keys(Path(), site)
    return Path()


def describe(fedunfold: Command, site: str, *more: object) -> int:
    options = ("--label", "diagnosis", "--key", f"{site}.pub", "--out", f"{site}.json")
    return fedunfold("site", "describe", f"{site}.csv", *options, *more).code


def agree(fedunfold: Command, *more: object) -> None:
    assert not any(describe(fedunfold, site) for site in SITES)
    descriptions = [f"{site}.json" for site in SITES]
    assert fedunfold("site", "agree", *descriptions, "--label", "diagnosis", "--out", "recipe.json", *more).code == 0


def test_what_leaves_is_shown_before_anything_is_written(fedunfold: Command, folder: Path) -> None:
    shown = fedunfold("site", "describe", "basel.csv", "--key", "basel.pub")
    assert shown.code == 0
    assert "column age: kind number, missing 0.0, count 32, sum" in shown.out
    assert "label: name diagnosis, kind classes, classes no | yes" in shown.out
    assert not Path("basel.json").exists()
    found = fedunfold("site", "describe", "basel.csv", "--key", "basel.pub", "--out", "basel.json", "--format", "json")
    assert found.json["bytes"] == Path("basel.json").stat().st_size
    assert found.json["content"] == json.loads(Path("basel.json").read_text())
    assert describe(fedunfold, "basel") == 2
    assert describe(fedunfold, "basel", "--overwrite", "--no-range", "--min-patients", 50) == 0
    withheld = json.loads(Path("basel.json").read_text())
    assert all(not column.keys() & {"moments", "range", "categories"} for column in withheld["columns"])


def test_from_tables_to_arrays(fedunfold: Command, folder: Path) -> None:
    agree(fedunfold, "--keys", "keys")
    assert {path.name for path in Path("keys").iterdir()} == {f"{site}.pub" for site in SITES}
    assert Path("keys/basel.pub").read_text().split()[:2] == Path("basel.pub").read_text().split()
    assert Path("recipe.toml").read_text().splitlines()[1] == 'clients = "basel budapest zürich"'
    done = fedunfold("site", "apply", "recipe.json", "basel.csv", "--out", "basel.npz", "--format", "json")
    assert done.json["files"] == ["basel.npz", "basel.held-out.npz"]
    assert (done.json["training_rows"], done.json["held_out_rows"], done.json["features"]) == (32, 8, 7)
    again = fedunfold("site", "apply", "recipe.json", "zürich.csv", "--site", "zürich", "--out", "z.npz")
    assert "wrote z.npz, z.held-out.npz: 32 rows to train on and 8 held out, 7 features." in again.out


def test_what_does_not_fit_is_one_sentence(fedunfold: Command, folder: Path) -> None:
    agree(fedunfold)
    Path("old.json").write_text(Path("recipe.json").read_text().replace('"version": 1', '"version": 2'))
    Path("edited.json").write_text(Path("recipe.json").read_text().replace('"seed": 0', '"seed": 1'))
    key, label = ("--key", "basel.pub"), ("--label", "diagnosis")
    for arguments, message in (
        (("describe", "none.csv", *key), "none.csv is no file"),
        (("describe", "basel.csv", *key, "--label", "outcome"), "`--label`: basel.csv has no column outcome"),
        (("describe", "basel.csv", "--key", "basel"), "basel is a private key, which must never leave its site"),
        (("describe", "basel.csv", "--key", "none.pub"), "none.pub cannot be read"),
        (("describe", "basel.csv", *key, "--test", 1.5), "--test: the fraction must lie between 0 and 1"),
        (("describe", "basel.csv", *key, "--site", "two words"), "must be 1 to 64 letters"),
        (("agree", "basel.json", *label, "--out", "a.json"), "a consortium has two sites or more"),
        (("agree", "basel.json", "basel.json", *label, "--out", "a.json"), "have the same name"),
        (("agree", "basel.json", "recipe.json", *label, "--out", "a.json"), "is a fedunfold site recipe and no"),
        (("agree", "basel.json", "zürich.json", "--label", "sex", "--out", "a.json"), "as its label, not sex"),
        (("agree", "basel.json", "zürich.json", *label, "--out", "a.txt"), "a recipe's file ends in .json"),
        (("agree", "basel.json", "zürich.json", *label, "--out", "recipe.json"), "exists already"),
        (("apply", "old.json", "basel.csv", "--out", "a.npz"), "was written by another version of fedunfold"),
        (("apply", "edited.json", "basel.csv", "--out", "a.npz"), "was changed after it was written"),
        (("apply", "recipe.json", "basel.csv", "--site", "rome", "--out", "a.npz"), "there is no site rome"),
        (("apply", "recipe.json", "basel.csv", "--out", "a.txt"), "a file that ends in .npz"),
        (("apply", "recipe.json", "basel.json", "--out", "a.npz"), "basel.json"),
    ):
        before = sorted(path.name for path in Path().iterdir())
        refused = fedunfold("site", *arguments)
        assert refused.code == 2, arguments
        assert message.replace("`", "") in refused.err.replace("`", ""), refused.err
        assert refused.err.count("\n") == 1
        assert sorted(path.name for path in Path().iterdir()) == before

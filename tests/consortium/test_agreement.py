"""From descriptions to a recipe: equal to data in one place, and every difference said or refused."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedunfold.consortium.agree import agree, run_settings
from fedunfold.consortium.apply import apply, check_site_file, held_out_file
from fedunfold.consortium.describe import describe
from fedunfold.consortium.description import Description
from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.consortium.roster import RosterSite
from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS
from fedunfold.data.importers.csv import CsvTable
from fedunfold.data.importers.recipe import read_recipe
from fedunfold.data.importers.tabular import encode
from tests.consortium.keys import public_text
from tests.data.importers.tables import SITES, Hospitals


def described(folder: Path, label: str = "diagnosis", **options: Any) -> list[Description]:
    return [
        describe(CsvTable(folder / f"{site}.csv"), RosterSite(name=site, public_key=public_text()), label, **options)[0]
        for site in SITES
    ]


def recipe_of(folder: Path, label: str = "diagnosis", **options: Any) -> SiteRecipe:
    return agree(described(folder, label), label, **options)[0]


@pytest.fixture
def files() -> Hospitals:
    return Hospitals()


def test_a_site_gets_what_it_would_get_in_one_place(files: Hospitals, tmp_path: Path) -> None:
    """The same rows held out, the same classes and features; only the columns' order is that of their names."""
    folder = files.write(tmp_path / "sites")
    tables = {site: CsvTable(folder / f"{site}.csv") for site in SITES}
    together, recipe = encode(tables, 0.2, "diagnosis", task=TASKS.make("binary")), recipe_of(folder)
    assert recipe.classes == together.classes
    assert recipe.task == together.task
    assert together.recipe is not None
    names = [(entry["column"], entry.get("is")) for entry in together.recipe["features"]]
    own = [(entry["column"], entry.get("is")) for entry in recipe.columns()["features"]]
    order = [names.index(name) for name in own]
    assert [name for name, _ in own] == sorted(name for name, _ in names)
    tested = []
    for site, table in tables.items():
        found, (x, y) = apply(recipe, table, site), together.clients[site]
        np.testing.assert_allclose(found.train[0], x[:, order], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found.train[1], y)
        tested.append(found.held_out)
    np.testing.assert_allclose(np.concatenate([x for x, _ in tested]), together.test[0][:, order], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([y for _, y in tested]), together.test[1])


def test_order_and_separators_do_not_matter(files: Hospitals, tmp_path: Path) -> None:
    plain = files.write(tmp_path / "plain")
    files.rows["zürich"] = [row[::-1] for row in files.rows["zürich"]]
    files.separator["basel"] = ";"
    other = files.write(tmp_path / "other")
    recipe, notes = agree(described(other), "diagnosis")
    assert recipe.features == recipe_of(plain).features
    assert notes == ["columns are matched by name: zürich have them in another order than basel."]
    np.testing.assert_array_equal(
        apply(recipe, CsvTable(other / "zürich.csv"), "zürich").train[0],
        apply(recipe, CsvTable(plain / "zürich.csv"), "zürich").train[0],
    )


def test_a_column_that_a_site_lacks_is_filled_in_and_marked(files: Hospitals, tmp_path: Path) -> None:
    files.rows["zürich"] = [[cell for i, cell in enumerate(row) if i not in (0, 3)] for row in files.rows["zürich"]]
    files.set("basel", 2, "age", "")
    folder = files.write(tmp_path / "sites")
    recipe, notes = agree(described(folder), "diagnosis")
    assert recipe.missing_at == {"age": ("zürich",), "ecg": ("zürich",)}
    assert [note.partition(";")[0] for note in notes] == [
        f"column {name}: zürich has no cell of it" for name in ("age", "ecg")
    ]
    found = apply(recipe, CsvTable(folder / "zürich.csv"), "zürich")
    columns = [(entry["column"], *entry) for entry in recipe.columns()["features"]]
    features = dict(zip(columns, found.train[0].T, strict=True))
    assert (features["age", "column", "missing", "mean", "scale"] == 0).all()
    assert (features["age", "column", "gap"] == 1).all()
    assert (features["ecg", "column", "gap"] == 1).all()
    assert (features["ecg", "column", "is"] == 0).all()
    assert found.notes == (f"{folder / 'zürich.csv'} has no column age, ecg: filled in as the recipe says.",)
    shared, left_out = agree(described(folder), "diagnosis", columns="shared")
    assert {feature.column for feature in shared.features} == {"sex", "pressure"}
    assert left_out[0] == "column age was left out: zürich has no cell of it."


def test_of_few_patients_nothing_is_told(files: Hospitals, tmp_path: Path) -> None:
    files.each("pressure", lambda i, cell: cell if i % 40 < 4 else "", "basel")
    files.set("basel", 9, "ecg", "pacemaker")
    for line in (3, 5, 7, 9):
        files.set("zürich", line, "diagnosis", "unclear")
    folder = files.write(tmp_path / "sites")
    basel, _, zürich = described(folder)
    told = {column.name: column for column in basel.columns}
    assert told["pressure"].kind == "number"
    assert told["pressure"].moments is None and told["pressure"].range is None
    assert told["ecg"].others and told["ecg"].categories == ("lvh", "normal", "st-t")
    assert "pacemaker" not in basel.text()
    assert zürich.label.others and "unclear" not in zürich.text()
    recipe, notes = agree([basel, *described(folder)[1:]], "diagnosis")
    assert "zürich has rarer classes of diagnosis too; rows of a class that no site has told are refused." in notes
    found = apply(recipe, CsvTable(folder / "basel.csv"), "basel")
    assert (
        "column ecg: 1 cells have a text that the recipe does not list, such as 'pacemaker' in line 9." in found.notes
    )
    with pytest.raises(InputError, match=r"zürich.csv, line 3: no site has told the diagnosis 'unclear'"):
        apply(recipe, CsvTable(folder / "zürich.csv"), "zürich")
    everything = described(folder, min_patients=1, ranges=False)
    assert "pacemaker" in everything[0].columns[3].categories
    assert all(column.range is None for own in everything for column in own.columns)


def test_what_is_withheld_everywhere_is_left_out(files: Hospitals, tmp_path: Path) -> None:
    files.each("pressure", lambda i, cell: cell if i % 40 < 3 else "")
    files.each("ecg", lambda i, _: f"{'abcdefghij'[i % 10]}")
    folder = files.write(tmp_path / "sites")
    recipe, notes = agree(described(folder), "diagnosis")
    assert "column pressure was left out: every site has too few cells of it to tell of them." in notes
    assert "column ecg was left out: no site has a text of it often enough to tell it." in notes
    assert {feature.column for feature in recipe.features} == {"age", "sex"}


def test_numbers_here_and_texts_there_are_refused(files: Hospitals, tmp_path: Path) -> None:
    files.each("age", lambda i, _: ("young", "old")[i % 2], "budapest")
    folder = files.write(tmp_path / "sites")
    with pytest.raises(InputError, match="column age holds numbers at zürich and texts at budapest, such as 'old'"):
        recipe_of(folder)
    assert {feature.column for feature in recipe_of(folder, drop=["age"]).features} == {"sex", "pressure", "ecg"}


def test_other_units_are_said(files: Hospitals, tmp_path: Path) -> None:
    files.each("pressure", lambda _, cell: f"{float(cell) / 1000:.4f}", "basel")
    _, notes = agree(described(files.write(tmp_path / "sites")), "diagnosis")
    (note,) = notes
    assert note.startswith("column pressure has the mean 0.1")
    assert "at basel and 1" in note and "if that is another unit" in note


def test_descriptions_that_contradict_each_other_are_refused(files: Hospitals, tmp_path: Path) -> None:
    folder = files.write(tmp_path / "sites")
    a, b, c = described(folder)
    other = described(folder, test=0.3)[1]
    by_sex = described(folder, "sex")[2]
    for descriptions, label, message in (
        ([a], "diagnosis", "two sites or more"),
        ([a, b, a], "diagnosis", "sites basel and basel have the same name"),
        ([a, other, c], "diagnosis", "basel and budapest were described with another test fraction, 0.2 and 0.3"),
        ([a, b, by_sex], "diagnosis", "site zürich has described sex as its label, not diagnosis"),
        ([a, b, c], "sex", "site basel has described diagnosis as its label, not sex"),
    ):
        with pytest.raises(InputError, match=message):
            agree(descriptions, label)
    with pytest.raises(InputError, match="column fee is at no site"):
        agree([a, b, c], "diagnosis", drop=["fee"])
    with pytest.raises(InputError, match="to be one of two classes"):
        agree([a, b, c], "diagnosis", positive="maybe")
    assert agree([a, b, c], "diagnosis", positive="no")[0].classes == ("yes", "no")
    header = files.rows["basel"][0]
    header[header.index("age")] = "Age"
    with pytest.raises(InputError, match=r"'Age' \(basel\) and 'age' \(budapest\) differ by case"):
        recipe_of(files.write(folder))


def test_numbers_to_predict(files: Hospitals, tmp_path: Path) -> None:
    folder = files.write(tmp_path / "sites")
    tables = {site: CsvTable(folder / f"{site}.csv") for site in SITES}
    together, recipe = encode(tables, 0.2, "pressure", task=TASKS.make("regression")), recipe_of(folder, "pressure")
    assert recipe.task == TASKS.make("regression") and recipe.classes == ()
    assert recipe.target is not None and together.recipe is not None
    assert recipe.target.mean == pytest.approx(together.recipe["target"]["mean"], rel=1e-9)
    assert recipe.target.scale == pytest.approx(together.recipe["target"]["scale"], rel=1e-9)
    for site, table in tables.items():
        np.testing.assert_allclose(apply(recipe, table, site).train[1], together.clients[site][1], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="`positive` is about two classes"):
        agree(described(folder, "pressure"), "pressure", positive="yes")
    mixed = [*described(folder, "age", task="regression")[:2], described(folder, "age", categorical=["age"])[2]]
    with pytest.raises(InputError, match="age is described as numbers at budapest and as classes at zürich"):
        agree(mixed, "age")


def test_another_file_than_was_described_is_refused(files: Hospitals, tmp_path: Path) -> None:
    folder = files.write(tmp_path / "sites")
    recipe = recipe_of(folder)
    basel = folder / "basel.csv"
    text = basel.read_text()
    header, _, rest = text.partition("\n")
    for changed, message in (
        (header.replace("diagnosis", "outcome") + "\n" + rest, "has no column diagnosis, the label"),
        (header.replace("age", "years") + "\n" + rest, "has no column age, which basel had when it was described"),
        (header + "\n" + "old" + rest[2:], "is no number"),
    ):
        basel.write_text(changed)
        if message == "is no number":  # one of forty is taken for missing, as at every importer
            assert any(message in note for note in apply(recipe, CsvTable(basel), "basel").notes)
            continue
        with pytest.raises(InputError, match=message):
            apply(recipe, CsvTable(basel), "basel")
    with pytest.raises(InputError, match="there is no site rome among basel, budapest, zürich"):
        apply(recipe, CsvTable(basel), "rome")
    files.each("age", lambda i, _: ("young", "old")[i % 2], "basel")
    files.add("height", lambda i: str(150 + i), "basel")
    files.write(folder)
    with pytest.raises(InputError, match="column age is text at basel"):
        apply(recipe, CsvTable(basel), "basel")
    files.each("age", lambda i, _: str(900 + i), "basel")
    files.write(folder)
    notes = apply(recipe, CsvTable(basel), "basel").notes
    assert any("has no column height, so it was left out" in note for note in notes)
    assert any("column age: 40 cells lie beyond" in note for note in notes)


def test_arrays_know_their_recipe_and_site(files: Hospitals, tmp_path: Path) -> None:
    folder = files.write(tmp_path / "sites")
    recipe, other = recipe_of(folder), recipe_of(folder)  # with other keys
    path = tmp_path / "basel.npz"
    found = apply(recipe, CsvTable(folder / "basel.csv"), "basel")
    assert found.write(path) == [path, tmp_path / "basel.held-out.npz"]
    again = apply(recipe, CsvTable(folder / "basel.csv"), "basel")
    again.write(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()
    assert check_site_file(path, recipe, Path("recipe.json")) == "basel"
    assert check_site_file(held_out_file(path), recipe, Path("recipe.json")) == "basel"
    with pytest.raises(InputError, match=r"basel.npz was made by another recipe than recipe.json"):
        check_site_file(path, other, Path("recipe.json"))
    with np.load(path) as arrays, np.load(held_out_file(path)) as held_out:
        assert len(arrays["y"]) + len(held_out["y"]) == 40
    np.savez(path, x=found.train[0])
    with pytest.raises(InputError, match="has no site"):
        check_site_file(path, recipe, Path("recipe.json"))


def test_files_are_read_as_they_were_written(files: Hospitals, tmp_path: Path) -> None:
    descriptions = described(files.write(tmp_path / "sites"))
    recipe = agree(descriptions, "diagnosis")[0]
    for made in (descriptions[0], recipe):
        made.write(tmp_path / "recipe.json")
        found = type(made).read(tmp_path / "recipe.json")
        assert found == made and found.checksum == made.checksum
    settings = tomllib.loads(run_settings(recipe, tmp_path / "recipe.json"))
    assert TASKS.parse(settings["task"]) == recipe.task
    assert settings["clients"].split() == list(SITES)
    assert settings["recipe-checksum"] == recipe.checksum
    assert SiteRecipe.read(Path(settings["recipe"])) == recipe


def test_a_model_keeps_what_it_needs_of_the_recipe_and_not_who_the_sites_are(files: Hospitals, tmp_path: Path) -> None:
    recipe = recipe_of(files.write(tmp_path / "sites"))
    recipe.write(tmp_path / "recipe.json")
    kept = read_recipe(tmp_path / "recipe.json")
    assert kept == recipe.columns()
    assert "features" in kept
    assert not {"roster", "sites", "checksum"} & kept.keys()

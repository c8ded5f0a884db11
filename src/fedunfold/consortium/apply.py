"""A site makes features of its rows by the recipe that all have agreed on."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.data.importers.cells import NEEDS_PANDAS, read_rows
from fedunfold.data.importers.classes import Classes
from fedunfold.data.importers.column_kinds import column_kinds
from fedunfold.data.importers.columns import find_labels
from fedunfold.data.importers.csv import Table
from fedunfold.data.importers.imported import test_rows
from fedunfold.data.importers.number_targets import read_targets, strata
from fedunfold.data.importers.recipe import apply_recipe, known_texts, note_unseen
from fedunfold.data.npz import NUMBERS_AND_TEXT, read_npz
from fedunfold.io.atomic import write_atomically
from fedunfold.io.limits import TABLE_NUMBERS

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class SiteData:
    """A site's arrays.

    Attributes:
        site: Its name.
        recipe: The checksum of the recipe that made them.
        train: (x, y) of the rows it trains on.
        held_out: (x, y) of those it tests on; maybe none.
        notes: What the site should know.
    """

    site: str
    recipe: str
    train: tuple[NDArray[Any], NDArray[Any]]
    held_out: tuple[NDArray[Any], NDArray[Any]]
    notes: tuple[str, ...] = ()

    def write(self, path: Path) -> list[Path]:
        """Write x and y, and beside them those of the rows held out, where there are some, and an empty record of sums,
        where there is none.

        Args:
            path: The .npz of the training rows.

        Returns:
            The files.
        """
        other = held_out_file(path)
        sums_file(path).touch()  # what is in it outlives other data: the same model may be trained on them
        self._write(path, self.train)
        if not len(self.held_out[1]):
            other.unlink(missing_ok=True)  # of other rows
            return [path]
        self._write(other, self.held_out)
        return [path, other]

    def _write(self, path: Path, rows: tuple[NDArray[Any], NDArray[Any]]) -> None:
        arrays: dict[str, Any] = {"x": rows[0], "y": rows[1], "site": self.site, "recipe": self.recipe}
        write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))


def held_out_file(path: Path) -> Path:
    """Where the rows that a site holds out lie.

    >>> print(held_out_file(Path("site.npz")))
    site.held-out.npz
    """
    return path.with_suffix(".held-out.npz")


def sums_file(path: Path) -> Path:
    """Where a site's SuperNode stores which sums its updates have entered, since none may enter another one.

    >>> print(sums_file(Path("site.npz")))
    site.sums.json
    """
    return path.with_suffix(".sums.json")


def apply(recipe: SiteRecipe, table: Table, site: str) -> SiteData:
    """Make a site's arrays.

    Args:
        recipe: The recipe.
        table: The site's rows.
        site: Its name, one of the roster.

    Raises:
        InputError: The table is not the one that was described, or a cell cannot be used; the message names it.
    """
    recipe.roster.site(site)
    features = recipe.columns()["features"]
    rows, notes = _read(recipe, table, site, features)
    task = recipe.task
    if recipe.target is None:
        find_labels({site: table}, {site: rows}, recipe.label)  # refuses empty cells
        classes = Classes.named(recipe.classes)
        y: NDArray[Any] = classes.number(rows[recipe.label], table.name, "no site has told")
        groups, names = y, recipe.classes
    else:
        raw = read_targets(rows, (recipe.label,), table.name, task)
        groups, names = strata(raw, task), ("",)
        y = ((raw.astype(np.float64) - recipe.target.mean) / recipe.target.scale).astype(np.float32)
    x = apply_recipe(features, rows)
    if not np.isfinite(x).all():
        row = int(np.argmin(np.isfinite(x).all(1)))
        raise InputError(f"{table.name}, line {rows.index[row]}: has a number that is too large; correct it.")
    tested = test_rows(groups, names, recipe.test_fraction, recipe.seed, site)
    if not tested.any():
        notes.append("no row is held out: there are too few.")
    return SiteData(site, recipe.checksum, (x[~tested], y[~tested]), (x[tested], y[tested]), tuple(notes))


def _read(recipe: SiteRecipe, table: Table, site: str, features: list[dict[str, Any]]) -> "tuple[DataFrame, list[str]]":
    """The recipe's columns and the label, gaps where the site lacks a column; and what is odd about them."""
    pandas = import_extra("pandas", NEEDS_PANDAS)
    if recipe.label not in table.columns:
        raise InputError(f"{table.name} has no column {recipe.label}, the label; give the file that was described.")
    names = list(dict.fromkeys(entry["column"] for entry in features))
    known = known_texts(features)
    for name in names:
        if name not in table.columns and site not in recipe.missing_at.get(name, ()):
            raise InputError(
                f"{table.name} has no column {name}, which {site} had when it was described; add it, or describe the "
                "table again and agree anew."
            )
    present = [name for name in names if name in table.columns]
    kinds = column_kinds([table], present, [name for name in known if name in present])
    for name, first in kinds.texts.items():
        if name not in known:
            raise InputError(
                f"column {name} is text at {site} ({first}) and numbers in the recipe; write numbers alone."
            )
    rows = read_rows(table, present, (recipe.label,), [n for n in known if n in present], typos=kinds.typos)
    TABLE_NUMBERS.check(len(rows) * len(features), f"{table.name}: ")
    rows = rows.assign(**{name: pandas.Series(np.nan, rows.index) for name in names if name not in present})
    notes = [finding.message for finding in (*kinds.findings, *table.findings())]
    left_out = [name for name in table.columns if name not in (*names, recipe.label, recipe.id)]
    if left_out:
        notes.append(f"{table.name}: the recipe has no column {', '.join(left_out)}, so it was left out.")
    absent = [name for name in names if name not in present]
    if absent:
        notes.append(f"{table.name} has no column {', '.join(absent)}: filled in as the recipe says.")
    notes += note_unseen(rows, known, "that the recipe does not list")
    for name, (low, high) in recipe.ranges.items():
        beyond = rows[name][(rows[name] < low) | (rows[name] > high)]
        if len(beyond):
            notes.append(
                f"column {name}: {len(beyond)} cells lie beyond {low:g} to {high:g}, such as {beyond.iloc[0]:g} in "
                f"line {beyond.index[0]}; check their unit."
            )
    return rows, notes


def check_site_file(path: Path, recipe: SiteRecipe, recipe_file: Path) -> str:
    """Whose arrays a file has, once they are known to be made by a recipe.

    Args:
        path: A file that `SiteData.write` wrote.
        recipe: The recipe.
        recipe_file: Its file, for messages.

    Raises:
        InputError: The file is of something else, of another recipe, or of a site that is not in the roster.
    """
    found = read_npz(path, ["site", "recipe"], kinds=NUMBERS_AND_TEXT)
    if str(found["recipe"]) != recipe.checksum:
        raise InputError(f"{path} was made by another recipe than {recipe_file}; apply the recipe to the table again.")
    return recipe.roster.site(str(found["site"])).name

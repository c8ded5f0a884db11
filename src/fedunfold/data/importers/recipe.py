"""The recipe that makes features of rows: numbers on one scale with their gaps filled, texts one-hot.

Computed here and not by scikit-learn's ColumnTransformer, which takes 6 to 13 times as long, and whose StandardScaler
leaves a million timestamps unscaled because it takes them for constant.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.importers.cells import read_rows
from fedunfold.data.importers.csv import Table
from fedunfold.io.atomic import read_text
from fedunfold.io.limits import RECORD_BYTES

if TYPE_CHECKING:
    from pandas import DataFrame

Scaling = Literal["standard", "none"]
Recipe = Sequence[Mapping[str, Any]]

LARGEST = float(np.finfo(np.float32).max)


def make_recipe(
    texts: Mapping[str, Sequence[str]], train: "DataFrame", scaling: Scaling, gaps: Mapping[str, int]
) -> list[dict[str, Any]]:
    """For each feature: its column, and what it is of it.

    Args:
        texts: By column its texts, none where it holds numbers.
        train: The training rows of all clients.
        scaling: Whether numbers get mean 0 and deviation 1.
        gaps: How many missing cells a column has; one of numbers that has some gets a feature that says where.

    Returns:
        Entries with `column` and `is`, the text it stands for; or `missing`, the median that fills gaps, `mean` and
        `scale`; or `gap`, true for a feature that is 1 where the cell is missing.
    """
    recipe: list[dict[str, Any]] = []
    for name, choices in texts.items():
        if choices:
            recipe += [{"column": name, "is": text} for text in choices]
            continue
        values = train[name]
        median = float(values.median()) if values.notna().any() else 0.0
        values = values.fillna(median)
        if values.abs().max() > LARGEST:
            raise InputError(f"column {name} has numbers beyond {LARGEST:g}; give it another unit, or `drop` it.")
        mean, scale = 0.0, 1.0
        if scaling == "standard":
            constant = values.min() == values.max()  # rounding may leave a deviation, by which a test row would explode
            mean = float(values.iloc[0] if constant else values.mean())
            scale = 1.0 if constant else float(values.std(ddof=0))
        recipe.append({"column": name, "missing": median, "mean": mean, "scale": scale})
        if gaps.get(name):
            recipe.append({"column": name, "gap": True})
    return recipe


def apply_recipe(recipe: Recipe, rows: "DataFrame") -> NDArray[np.float32]:
    """(x − mean)/scale with gaps filled for numbers, 1 or 0 for texts and for whether a number is missing.

    Args:
        recipe: An entry for each feature.
        rows: Numbers and texts by column.

    Returns:
        The features, [rows, features]; what is too large for float32 is infinite.
    """
    result = np.empty((len(rows), len(recipe)), dtype=np.float32)
    with np.errstate(over="ignore"):
        for position, entry in enumerate(recipe):
            cells = rows[entry["column"]]
            if "is" in entry:
                result[:, position] = cells == entry["is"]
            elif "gap" in entry:
                result[:, position] = cells.isna()
            else:
                result[:, position] = (cells.fillna(entry["missing"]) - entry["mean"]) / entry["scale"]
    return result


def read_recipe(path: Path) -> dict[str, Any]:
    """The file that `imported.write_recipe` wrote: under `features` an entry for each feature.

    Args:
        path: The file.

    Raises:
        InputError: It is none.
    """
    try:
        found = json.loads(read_text(path, RECORD_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name the recipe of the data.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no recipe: it is not valid JSON ({error}).") from error
    if not is_recipe(found):
        raise InputError(f"{path} is no recipe; name the .columns.json that was written beside the data.")
    recipe: dict[str, Any] = found
    return recipe


def is_recipe(found: object) -> bool:
    """Whether a JSON value has under `features` an entry for each feature that `apply_recipe` can follow."""
    entries = found.get("features") if isinstance(found, dict) else None
    return isinstance(entries, list) and bool(entries) and all(map(_is_entry, entries))


def _is_entry(entry: object) -> bool:
    """Whether it says what a feature is of a column."""
    if not (isinstance(entry, dict) and isinstance(entry.get("column"), str)):
        return False
    if "is" in entry or "gap" in entry:
        return isinstance(entry.get("is", ""), str)
    return all(isinstance(entry.get(name), int | float) for name in ("missing", "mean", "scale"))


def encode_new_rows(table: Table, recipe: Recipe) -> tuple[NDArray[np.float32], list[str]]:
    """Features of rows that were not there when the recipe was made.

    Args:
        table: The rows; columns that the recipe does not know are left out.
        recipe: An entry for each feature, as `make_recipe` made them.

    Returns:
        The features, [rows, features], and what to know of them: texts that no training row had.

    Raises:
        InputError: A column is missing, or a cell is no number where the training rows have numbers.
    """
    names = list(dict.fromkeys(entry["column"] for entry in recipe))
    for name in names:
        if name not in table.columns:
            raise InputError(f"{table.name} has no column {name}, which the model was trained on; add it.")
    known: dict[str, set[str]] = {}
    for entry in recipe:
        if "is" in entry:
            known.setdefault(entry["column"], set()).add(entry["is"])
    rows = read_rows(table, names, (), known)
    notes = [finding.message for finding in table.findings()]
    for name, texts in known.items():
        strange = rows[name][rows[name].notna() & ~rows[name].isin(texts)]
        if len(strange):
            first = f"{strange.iloc[0]!r} in line {strange.index[0]}"
            notes.append(f"column {name}: {len(strange)} cells have a text that no training row had, such as {first}.")
    return apply_recipe(recipe, rows), notes

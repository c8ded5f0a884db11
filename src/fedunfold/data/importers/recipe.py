"""The recipe that makes features of rows: numbers on one scale with their gaps filled, texts one-hot.

Computed here and not by scikit-learn's ColumnTransformer, which takes 6 to 13 times as long, and whose StandardScaler
leaves a million timestamps unscaled because it takes them for constant.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    from pandas import DataFrame, Series

Scaling = Literal["standard", "none"]
Recipe = Sequence[Mapping[str, Any]]
FIELDS = ("label", "classes", "features", "id", "target", "task")
"""What a file says of how a table's columns become features and labels."""

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class NumberScale:
    """How a column of numbers becomes a feature: (x − mean)/scale, once its gaps are filled.

    Attributes:
        missing: What fills gaps.
        mean: The number that becomes 0.
        scale: How much becomes 1.
    """

    missing: float
    mean: float = 0.0
    scale: float = 1.0


def make_recipe(
    texts: Mapping[str, Sequence[str]], train: "DataFrame", scaling: Scaling, gaps: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The features of columns whose rows are all here; gaps are filled with the median.

    Args:
        texts: By column its texts, none where it holds numbers.
        train: The training rows of all clients.
        scaling: Whether numbers get mean 0 and deviation 1.
        gaps: How many missing cells a column has; one of numbers that has some gets a feature that says where.

    Returns:
        Entries as `list_features` makes them.
    """
    columns = {name: choices or _scale_of(name, train[name], scaling) for name, choices in texts.items()}
    return list_features(columns, {name for name in columns if gaps.get(name) and not texts[name]})


def _scale_of(name: str, values: "Series", scaling: Scaling) -> NumberScale:
    median = float(values.median()) if values.notna().any() else 0.0
    values = values.fillna(median)
    refuse_large(name, values.abs().max())
    if scaling == "none":
        return NumberScale(median)
    if values.min() == values.max():  # rounding may leave a deviation, by which a test row would explode
        return NumberScale(median, float(values.iloc[0]))
    return NumberScale(median, float(values.mean()), float(values.std(ddof=0)))


def refuse_large(name: str, largest: float) -> None:
    """Refuse a column whose numbers float32 does not hold."""
    if largest > LARGEST:
        raise InputError(f"column {name} has numbers beyond {LARGEST:g}; give it another unit, or `drop` it.")


def list_features(
    columns: Mapping[str, NumberScale | Sequence[str]], indicators: Collection[str]
) -> list[dict[str, Any]]:
    """For each feature: its column, and what it is of it.

    Args:
        columns: By column how its numbers are scaled, or its texts.
        indicators: Columns that get a feature that says where cells are missing.

    Returns:
        Entries with `column` and `is`, the text it stands for; or `missing`, `mean` and `scale`, as of `NumberScale`;
        or `gap`, true for a feature that is 1 where the cell is missing.

    >>> list_features({"age": NumberScale(50.0, 52.0, 9.0), "sex": ["f", "m"]}, {"age"})[:2]
    [{'column': 'age', 'missing': 50.0, 'mean': 52.0, 'scale': 9.0}, {'column': 'age', 'gap': True}]
    """
    features: list[dict[str, Any]] = []
    for name, found in columns.items():
        if isinstance(found, NumberScale):
            features.append({"column": name, **asdict(found)})
        else:
            features += [{"column": name, "is": text} for text in found]
        if name in indicators:
            features.append({"column": name, "gap": True})
    return features


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
    """The file that `imported.write_recipe` wrote, or the recipe of a consortium: under `features` an entry for each.

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
    return {name: found[name] for name in FIELDS if found.get(name) is not None}


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
    known = known_texts(recipe)
    rows = read_rows(table, names, (), known)
    return apply_recipe(recipe, rows), [*(finding.message for finding in table.findings()), *note_unseen(rows, known)]


def known_texts(recipe: Recipe) -> dict[str, set[str]]:
    """The columns of texts, with those that have a feature."""
    known: dict[str, set[str]] = {}
    for entry in recipe:
        if "is" in entry:
            known.setdefault(entry["column"], set()).add(entry["is"])
    return known


def note_unseen(
    rows: "DataFrame", known: Mapping[str, Collection[str]], of: str = "that no training row had"
) -> list[str]:
    """A sentence for each column with texts that have no feature, so that all of the column's are 0.

    Args:
        rows: Texts by column; the index is the line.
        known: As of `known_texts`.
        of: Which texts these are.
    """
    notes = []
    for name, texts in known.items():
        strange = rows[name][rows[name].notna() & ~rows[name].isin(texts)]
        if len(strange):
            first = f"{strange.iloc[0]!r} in line {strange.index[0]}"
            notes.append(f"column {name}: {len(strange)} cells have a text {of}, such as {first}.")
    return notes

"""A site looks at its own table, and tells what may leave."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedunfold.consortium.description import ColumnDescription, Description, LabelDescription
from fedunfold.consortium.moments import Moments, rounded_range
from fedunfold.consortium.roster import RosterSite
from fedunfold.core.errors import InputError
from fedunfold.core.settings import is_count
from fedunfold.data.arrays import Labels
from fedunfold.data.importers.cells import read_rows
from fedunfold.data.importers.classes import Classes, guess_task
from fedunfold.data.importers.column_kinds import column_kinds
from fedunfold.data.importers.columns import common_columns, find_labels, texts_of
from fedunfold.data.importers.csv import Table
from fedunfold.data.importers.findings import look_at_columns, look_at_ids, look_at_names
from fedunfold.data.importers.imported import Finding, test_rows
from fedunfold.data.importers.number_targets import read_targets, strata
from fedunfold.data.importers.recipe import refuse_large
from fedunfold.data.importers.tabular import labels_in
from fedunfold.tasks.regression import Regression

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MIN_PATIENTS = 5
TEST_FRACTION = 0.2


def describe(
    table: Table,
    site: RosterSite,
    label: str,
    *,
    task: Literal["classification", "regression"] | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    id: str | None = None,
    test: float = TEST_FRACTION,
    seed: int = 0,
    min_patients: int = MIN_PATIENTS,
    ranges: bool = True,
) -> tuple[Description, list[Finding]]:
    """What may leave a site of its table.

    Kinds of columns are decided as for data that are in one place (`column_kinds`). Moments and ranges are told where
    at least `min_patients` cells are filled, categories and classes of at least as many rows.

    Args:
        table: The site's rows.
        site: Its name and public key.
        label: The column to predict.
        task: What is predicted; by default what the column looks like.
        drop: Columns to leave out.
        categorical: Columns of categories, whatever their cells look like.
        id: The column that tells rows apart: no feature.
        test: The part of the rows of every class that is held out.
        seed: Draws them.
        min_patients: The fewest rows of which anything leaves the site.
        ranges: Whether to tell what numbers lie in.

    Returns:
        The description, and what may be a mistake in the data, which is for the site alone.

    Raises:
        InputError: The table cannot be used; the message names file, line and column.
    """
    if not 0 < test < 1:
        raise InputError(f"`test`: the fraction must lie between 0 and 1, not {test:g}.")
    if not is_count(min_patients):
        raise InputError(f"`min_patients` is a whole number of at least 1, not {min_patients}.")
    names = common_columns([table], (label,), drop, categorical, id)
    kinds = column_kinds([table], names, categorical)
    rows = read_rows(table, names, (label,), kinds.texts, typos=kinds.typos)
    empty = {name for name in names if rows[name].isna().all()}
    texts = texts_of(rows, [name for name in names if name not in empty], kinds.texts, categorical)
    target, y, classes = _label(table, site.name, rows, label, task, label in categorical, min_patients)
    train = ~test_rows(y, classes, test, seed, site.name)
    if target.kind == "number":
        numbers = read_targets(rows, (label,), table.name, Regression())[train, 0].astype(np.float64)
        target = target.model_copy(update={"moments": Moments.of(numbers) if len(numbers) >= min_patients else None})
    description = Description(
        site=site,
        rows=len(rows),
        training_rows=int(train.sum()),
        test_fraction=test,
        seed=seed,
        min_patients=min_patients,
        label=target,
        id=id,
        columns=tuple(_column(name, rows[name], texts.get(name), train, min_patients, ranges) for name in names),
    )
    findings = [
        *kinds.findings,
        *table.findings(),
        *look_at_names(table),
        *look_at_columns({site.name: rows}, texts),
        *(look_at_ids({site.name: table}, id) if id is not None else ()),
    ]
    return description, findings


def _label(
    table: Table, site: str, rows: "DataFrame", label: str, task: str | None, categorical: bool, min_patients: int
) -> tuple[LabelDescription, Labels, tuple[str, ...]]:
    """The label's description without moments, and by which classes test rows are drawn: number and name of each."""
    task = task or guess_task(labels_in([table], label), classes=categorical)
    if task == "regression":
        y = strata(np.zeros((len(rows), 1)), Regression())
        return LabelDescription(name=label, kind="number"), y, ("",)
    found = find_labels({site: table}, {site: rows}, label)
    if len(found) > 1:
        classes = Classes.of(found, label, rows=len(rows), categorical=categorical)
    else:  # another site has others
        classes = Classes.alone(*found)
    y = classes.number(rows[label], table.name)
    counts = np.bincount(y, minlength=len(classes.names))
    listed = tuple(name for name, count in zip(classes.names, counts, strict=True) if count >= min_patients)
    others = len(listed) < len(classes.names)
    target = LabelDescription(name=label, kind="classes", classes=listed, others=others, categorical=categorical)
    return target, y, classes.names


def _column(
    name: str, cells: "Series", texts: Sequence[str] | None, train: np.ndarray, min_patients: int, ranges: bool
) -> ColumnDescription:
    """A column that is empty, or has texts or numbers; of few cells nothing leaves, since sums would reveal them."""
    missing = float(cells.isna().mean())
    if texts is None:
        return ColumnDescription(name=name, kind="empty", missing=missing)
    if texts:
        counts = cells.value_counts()
        listed = tuple(text for text in texts if counts[text] >= min_patients)
        others = len(listed) < len(texts)
        return ColumnDescription(name=name, kind="category", missing=missing, categories=listed, others=others)
    filled, trained = cells.dropna().to_numpy(), cells[train].dropna().to_numpy()
    refuse_large(name, np.abs(filled).max())
    enough = len(trained) >= min_patients
    return ColumnDescription(
        name=name,
        kind="number",
        missing=missing,
        moments=Moments.of(trained) if enough else None,
        range=rounded_range(filled) if enough and ranges else None,
    )

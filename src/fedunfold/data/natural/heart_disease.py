"""Heart disease in four hospitals, as FLamby prepares and splits it."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.natural.base import Clients, NaturalSource, standardise
from fedunfold.data.natural.files import PublicFile, parse_numbers, read_public
from fedunfold.data.sources import Pair

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
PAGE = "https://archive.ics.uci.edu/dataset/45/heart+disease"
COLUMNS = 14
NUMBERS = (0, 1, 3, 4, 5, 7, 8, 9)
"""Age, sex, blood pressure, cholesterol, blood sugar, heart rate, angina by exercise, ST depression."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Chest pain and electrocardiogram: the values that get a feature of their own; the lowest has none."""
FLAMBY_TRAIN, FLAMBY_SEED = 0.66, 43


class HeartDiseaseSource(NaturalSource):
    """740 patients of four hospitals, 13 features, target 1 for any heart disease; FLamby's training and test rows.

    The columns slope, ca and thal, which most hospitals lack, are dropped, and then rows with a gap. The four files
    processed.<hospital>.data have to be brought: nobody publishes their checksums.

    Reference: Janosi, Steinbrunn, Pfisterer and Detrano 1988, Heart Disease, UCI; Ogier du Terrail et al. 2022, FLamby.
    """

    source: Literal["heart-disease"] = "heart-disease"

    def load_clients(self) -> tuple[Clients, Pair]:
        tables = [_read(hospital) for hospital in HOSPITALS]
        starts = np.cumsum([0, *(len(disease) for _, disease in tables[:-1])])
        splits = [_split(disease) for _, disease in tables]
        train = [start + own for start, (own, _) in zip(starts, splits, strict=True)]
        test = np.concatenate([start + own for start, (_, own) in zip(starts, splits, strict=True)])
        x = standardise(np.concatenate([features for features, _ in tables]), np.concatenate(train))
        y = np.concatenate([disease for _, disease in tables])
        return {key: (x[own], y[own]) for key, own in zip(HOSPITALS, train, strict=True)}, (x[test], y[test])


def _read(hospital: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Features and targets of the complete rows of a hospital."""
    name, text = read_public(PublicFile(f"processed.{hospital}.data", PAGE))
    table = parse_numbers([line.split(",") for line in text.splitlines() if line.strip()], name)
    if table.shape[1] != COLUMNS:
        raise InputError(f"{name} has {table.shape[1]} columns, where {COLUMNS} belong; get the file again.")
    table = table[~np.isnan(table[:, [*range(10), 13]]).any(1)]
    if len(table) < 2:
        raise InputError(f"{name} has fewer than two rows without a gap; get the file again.")
    dummies = [table[:, column] == value for column, values in CATEGORIES.items() for value in values]
    return np.column_stack([table[:, NUMBERS], *dummies]), (table[:, 13] > 0).astype(np.int64)


def _split(disease: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train and to test on, drawn as FLamby does: by class where each has three rows or more."""
    from sklearn.model_selection import train_test_split  # here, because importing it takes a second

    stratify = disease if np.bincount(disease, minlength=2).min() > 2 else None
    train, test = train_test_split(
        np.arange(len(disease)),
        train_size=FLAMBY_TRAIN,
        test_size=1 - FLAMBY_TRAIN,
        random_state=FLAMBY_SEED,
        stratify=stratify,
    )
    return np.sort(train), np.sort(test)

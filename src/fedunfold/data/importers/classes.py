"""The classes that a column of labels names."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.arrays import Labels

if TYPE_CHECKING:
    from pandas import Series

FEW = 20
"""So many whole numbers may be classes; more are taken for measurements."""
INTEGER = re.compile(r"([+-]?\d+)(\.0*)?")


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and float(text) == float(text)
    except ValueError:
        return False


def guess_task(labels: Collection[str]) -> Literal["classification", "binary", "regression"]:
    """The task that the values of a column suggest.

    Args:
        labels: The different values.

    Returns:
        Regression for fractions and for many whole numbers; else classification, binary for two values.

    >>> guess_task(["ill", "well"]), guess_task(["1", "2", "3"]), guess_task(["1.5", "2"])
    ('binary', 'classification', 'regression')
    """
    numbers = all(map(_is_number, labels))
    if numbers and (len(labels) > FEW or not all(map(INTEGER.fullmatch, labels))):
        return "regression"
    return "binary" if len(labels) == 2 else "classification"


@dataclass(frozen=True)
class Classes:
    """Classes and how labels name them.

    Attributes:
        names: In the order of their numbers: by size where all are integers, else alphabetical.
        integers: Whether all are integers; then 1, 01 and 1.0 are one class.
    """

    names: tuple[str, ...]
    integers: bool

    @classmethod
    def of(cls, labels: Mapping[str, str], column: str) -> "Classes":
        """Order the classes that labels name.

        Args:
            labels: The different labels, with where each occurs first.
            column: Their column, for messages.

        Returns:
            The classes, two at least.

        Raises:
            InputError: The labels are measurements, or all the same.
        """
        measured = next((text for text in labels if not INTEGER.fullmatch(text)), None)
        if measured is not None and all(map(_is_number, labels)):
            raise InputError(
                f"{labels[measured]}: column {column} has {measured}, a measurement and no class; "
                "choose a column of classes as `label`."
            )
        made = cls((), integers=measured is None)
        names = sorted({made.name_of(text) for text in labels}, key=int if made.integers else None)
        if len(names) < 2:
            raise InputError(f"column {column} has only the value {names[0]}; choose a column of classes as `label`.")
        return cls(tuple(names), made.integers)

    def name_of(self, text: str) -> str:
        """The class that a label names."""
        match = INTEGER.fullmatch(text) if self.integers else None
        return str(int(match[1])) if match else text

    def number(self, labels: "Series", table: str) -> Labels:
        """The class number of each label; those of `table` that are no class of the clients are refused."""
        numbers = {name: number for number, name in enumerate(self.names)}
        texts = labels.astype(str).where(labels.notna(), "")
        found = np.array([numbers.get(self.name_of(text), -1) for text in texts], dtype=np.int64)
        for line, text in texts[found < 0].items():
            raise InputError(f"{table}, line {line}: no client has the {labels.name} {text!r}; take the row out.")
        return found

"""The classes that a column of labels names."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.arrays import Labels
from fedunfold.data.importers.cells import FEW, alike_spellings, is_number

if TYPE_CHECKING:
    from pandas import Series

INTEGER = re.compile(r"([+-]?\d+)(\.0*)?")


def guess_task(labels: Collection[str], classes: bool = False) -> Literal["classification", "binary", "regression"]:
    """The task that the values of a column suggest.

    Args:
        labels: The different values.
        classes: Whether they are known to be classes.

    Returns:
        Regression for fractions and for many whole numbers; else classification, binary for two values.

    >>> guess_task(["ill", "well"]), guess_task(["1", "2", "3"]), guess_task(["1.5", "2"])
    ('binary', 'classification', 'regression')
    """
    numbers = all(map(is_number, labels))
    if not classes and numbers and (len(labels) > FEW or not all(map(INTEGER.fullmatch, labels))):
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
    def of(
        cls,
        labels: Mapping[str, str],
        column: str,
        *,
        rows: int = 0,
        categorical: bool = False,
        positive: str | None = None,
    ) -> "Classes":
        """Order the classes that labels name.

        Args:
            labels: The different labels, with where each occurs first.
            column: Their column, for messages.
            rows: How many rows they are the labels of.
            categorical: Whether they are classes as they stand, though they look like measurements, ids or one class
                in several spellings.
            positive: The one of two classes that gets the number 1.

        Returns:
            The classes, two at least.

        Raises:
            InputError: The labels are measurements, ids or all the same, or classes are spelled in several ways.
        """
        made = cls((), integers=all(map(INTEGER.fullmatch, labels)))
        where: dict[str, str] = {}
        for text, place in labels.items():
            where.setdefault(made.name_of(text), place)
        _refuse_measurements(labels, column)
        if not categorical:
            _refuse_what_is_no_class(where, column, made.integers, rows)
        names = sorted(where, key=int if made.integers else None)
        if len(names) < 2:
            raise InputError(f"column {column} has only the value {names[0]}; choose a column of classes as `label`.")
        if positive is not None:
            chosen = made.name_of(positive.strip())
            if len(names) != 2 or chosen not in names:
                raise InputError(
                    f"`positive`: {positive} is to be one of two classes, but column {column} has "
                    f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}; choose one, or leave it out."
                )
            names.sort(key=chosen.__eq__)
        return cls(tuple(names), made.integers)

    @classmethod
    def alone(cls, label: str) -> "Classes":
        """The class of a client that has no other.

        >>> Classes.alone("01").names
        ('1',)
        """
        made = cls((), integers=bool(INTEGER.fullmatch(label)))
        return cls((made.name_of(label),), made.integers)

    @classmethod
    def named(cls, names: Sequence[str]) -> "Classes":
        """Classes that have been ordered before."""
        return cls(tuple(names), integers=all(map(INTEGER.fullmatch, names)))

    def name_of(self, text: str) -> str:
        """The class that a label names."""
        match = INTEGER.fullmatch(text) if self.integers else None
        return str(int(match[1])) if match else text

    def number(self, labels: "Series", table: str, nobody: str = "no client has") -> Labels:
        """The class number of each label; those of `table` that are no class of the clients are refused."""
        numbers = {name: number for number, name in enumerate(self.names)}
        texts = labels.astype(str).where(labels.notna(), "")
        found = np.array([numbers.get(self.name_of(text), -1) for text in texts], dtype=np.int64)
        for line, text in texts[found < 0].items():
            raise InputError(f"{table}, line {line}: {nobody} the {labels.name} {text!r}; take the row out.")
        return found


def _refuse_measurements(labels: Mapping[str, str], column: str) -> None:
    measured = next((text for text in labels if not INTEGER.fullmatch(text)), None)
    if measured is not None and all(map(is_number, labels)):
        raise InputError(
            f"{labels[measured]}: column {column} has {measured}, a measurement and no class; "
            "choose the task regression, or a column of classes as `label`."
        )


def _refuse_what_is_no_class(where: Mapping[str, str], column: str, integers: bool, rows: int) -> None:
    """What would make classes that nobody meant."""
    remedy = f"name {column} in `categorical` if they are classes"
    if integers and len(where) > FEW:
        raise InputError(
            f"column {column} has {len(where)} different whole numbers, which are taken for measurements and not for "
            f"classes; choose the task regression, or {remedy}."
        )
    if not integers and len(where) > max(FEW, rows / 2):
        raise InputError(
            f"column {column} has {len(where)} different labels in {rows} rows, too many to be classes; choose another "
            f"`label`, or {remedy}."
        )
    for first, second, *_ in alike_spellings(list(where)):
        raise InputError(
            f"column {column}: the labels {first!r} ({where[first]}) and {second!r} ({where[second]}) differ by case "
            f"or blanks only; write them alike, or {remedy} of their own."
        )
    number = next((text for text in where if is_number(text)), None)
    text = next((text for text in where if not is_number(text)), None)
    if number is not None and text is not None:
        raise InputError(
            f"column {column} has numbers as labels ({number}: {where[number]}) and texts ({text}: {where[text]}); "
            f"write them alike, or {remedy}."
        )

"""What a site tells of its table: never a row, and of few patients nothing."""

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from fedunfold.consortium.documents import Document
from fedunfold.consortium.moments import Moments
from fedunfold.consortium.roster import RosterSite
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Natural, Settings, Share, shown

Kind = Literal["number", "category", "empty"]
LONGEST = 1000  # characters of a column's name or of a category


def _without_control(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError(f"must be one line without control characters, got {shown(text)}")
    return text


Text = Annotated[str, Field(min_length=1, max_length=LONGEST), AfterValidator(_without_control)]
"""What comes from a site's table and is shown at the coordinator."""


class ColumnDescription(Settings):
    """A feature column.

    Attributes:
        name: Its name.
        kind: What it holds; `empty` where no cell is filled.
        missing: The part of the rows in which the cell is missing.
        moments: Of the training rows' numbers.
        range: What all its numbers lie in, rounded outwards.
        categories: The texts of at least `min_patients` rows.
        others: Whether there are more texts, which are not told.
    """

    name: Text
    kind: Kind
    missing: Share
    moments: Moments | None = None
    range: tuple[float, float] | None = None
    categories: tuple[Text, ...] = ()
    others: bool = False


class LabelDescription(Settings):
    """The column to predict.

    Attributes:
        name: Its name.
        kind: Whether it holds classes or numbers.
        classes: Those of at least `min_patients` rows.
        others: Whether there are more classes, which are not told.
        categorical: Whether they are classes as they stand, whatever they look like.
        moments: Of the training rows' numbers.
    """

    name: Text
    kind: Literal["classes", "number"]
    classes: tuple[Text, ...] = ()
    others: bool = False
    categorical: bool = False
    moments: Moments | None = None


class Description(Document):
    """What leaves a site.

    Attributes:
        site: Its name and its SuperNode's public key.
        rows: How many it has.
        training_rows: How many of them it will train on.
        test_fraction: The part of the rows of every class that it holds out.
        seed: Draws them.
        min_patients: Of fewer rows, categories, classes, moments and ranges are not told.
        label: The column to predict.
        id: The column that tells rows apart.
        columns: The feature columns in the order of its file.
    """

    kind: ClassVar[str] = "fedunfold site description"
    made_by: ClassVar[str] = "`fedunfold site describe`"

    site: RosterSite
    rows: Count
    training_rows: Count
    test_fraction: float = Field(gt=0, lt=1)
    seed: Natural
    min_patients: Count
    label: LabelDescription
    id: Text | None = None
    columns: tuple[ColumnDescription, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> "Description":
        names = [self.label.name, *(column.name for column in self.columns)]
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise InputError(f"the column {twice} is there twice")
        if self.training_rows > self.rows:
            raise InputError(f"{self.training_rows} training rows are more than {self.rows} rows")
        return self

    def listing(self) -> list[tuple[str, str]]:
        """Everything that is in the file: (field, its values); a line for each column."""
        content = self.document()
        columns = content.pop("columns")
        return [
            *((name, ", ".join(_values(value))) for name, value in content.items()),
            *((f"column {own.pop('name')}", ", ".join(_values(own))) for own in columns),
        ]


def _values(value: Any, name: str = "") -> Iterator[str]:
    """All single values in a JSON value, by name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, key)
    elif isinstance(value, list):
        yield f"{name} {' | '.join(map(str, value))}".lstrip()
    else:
        yield f"{name} {value}".lstrip()

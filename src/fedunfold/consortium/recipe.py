"""What all sites have agreed on: how a row of any of them becomes features, and who they are."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fedunfold.config.fields import Key, TaskField
from fedunfold.consortium.description import Text
from fedunfold.consortium.documents import Document
from fedunfold.consortium.roster import AGREE, RECIPE, Roster
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Natural, Settings
from fedunfold.data.importers.recipe import FIELDS
from fedunfold.io.limits import FEATURES
from fedunfold.tasks.classification import Classification


class CategoryFeature(Settings):
    """1 where a cell is this text, else 0."""

    model_config = ConfigDict(populate_by_name=True)

    column: Text
    text: Text = Field(alias="is")


class NumberFeature(Settings):
    """(x − mean)/scale, with gaps filled by `missing`."""

    column: Text
    missing: float
    mean: float
    scale: float = Field(gt=0)


class GapFeature(Settings):
    """1 where a cell is missing, else 0."""

    column: Text
    gap: Literal[True]


class Target(Settings):
    """How the numbers of a regression are standardised: (y − mean)/scale."""

    mean: float
    scale: float = Field(gt=0)


class SiteRecipe(Document):
    """The recipe.

    Attributes:
        roster: The sites and their public keys.
        label: The column to predict.
        task: What a model is trained for.
        classes: The classes in the order of their numbers; none for numbers.
        target: How numbers to predict are standardised.
        id: The column that tells rows apart, where all sites have it.
        test_fraction: The part of the rows of every class that each site holds out.
        seed: Draws them.
        features: In the order of their columns' names.
        ranges: What the numbers of a column lie in, at all sites that told it.
        missing_at: By column, the sites that do not have it.
    """

    kind: ClassVar[str] = RECIPE
    made_by: ClassVar[str] = AGREE

    roster: Roster
    label: Text
    task: TaskField
    classes: tuple[Text, ...] = ()
    target: Target | None = None
    id: Text | None = None
    test_fraction: float = Field(gt=0, lt=1)
    seed: Natural
    features: tuple[CategoryFeature | NumberFeature | GapFeature, ...] = Field(min_length=1)
    ranges: Mapping[Text, tuple[float, float]] = {}
    missing_at: Mapping[Text, tuple[Key, ...]] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        FEATURES.check(len(self.features))
        expected = self.task.classes if isinstance(self.task, Classification) else 0
        if len(self.classes) != expected or len(set(self.classes)) < len(self.classes):
            raise InputError(f"{len(self.classes)} classes do not fit the task {self.task.name}")
        return self

    def columns(self) -> dict[str, Any]:
        """How a table's columns become features, as `fedunfold env new` writes it beside its data."""
        written = self.model_dump(mode="json", by_alias=True, include=set(FIELDS))
        return {name: value for name, value in written.items() if value is not None}

"""Suites: which environments methods are compared on, and how often."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from fedunfold.config import Environment, environment
from fedunfold.config.fields import Name
from fedunfold.core.errors import InputError
from fedunfold.core.registry import unknown
from fedunfold.core.settings import Count, Settings
from fedunfold.io.atomic import parse_toml, read_text
from fedunfold.io.limits import ENVIRONMENT_BYTES
from fedunfold.studies.benchmark.contenders import Contender
from fedunfold.studies.cases import HELD_OUT, StudyCase

TUNING_DRAWS = 10_000
"""Where the clients' data are drawn anew in every trial, settings are chosen on draws from here on: others."""


class Place(Settings):
    """An environment of a suite.

    Attributes:
        environment: The name of a bundled one, or a TOML file, from the suite's folder.
        changes: Fields of it that are other here.
        trials: How many runs of each method; the suite's number by default.
        redraw: Whether every trial divides the data anew: the partition's seed is then the trial's number.
        choose_by: The metric on validation rows that settings are chosen by; the task's primary one by default.
        notes: What a reader has to know.
    """

    environment: Annotated[str, Field(min_length=1)]
    changes: Mapping[str, Any] = Field(default_factory=dict)
    trials: Count | None = None
    redraw: bool = False
    choose_by: str | None = None
    notes: str = ""

    @field_validator("changes")
    @classmethod
    def _are_fields(cls, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := [name for name in changes if name not in Environment.model_fields]:
            raise ValueError(f"{unknown[0]} is no field of an environment; remove it or correct its name")
        return changes

    def case(
        self, folder: Path, trial: int, *, tuning: bool = False, changes: Mapping[str, Any] | None = None
    ) -> StudyCase:
        """What a run trains on and is tested on.

        Args:
            folder: Where relative paths count from.
            trial: Which trial.
            tuning: Whether settings are chosen by it: rows that clients hold out of training then stand in the place of
                the test set.
            changes: Fields that are other for a method.

        Raises:
            InputError: There is no such environment, or a change does not fit.
        """
        own = folder / self.environment if self.environment.endswith(".toml") else self.environment
        env = environment(own).replace(**{**self.changes, **(changes or {})})
        if self.redraw:
            if not hasattr(env.partition, "seed"):
                raise InputError(f"environment {env.name}: its partition draws nothing; leave `redraw` out.")
            seed = trial + (TUNING_DRAWS if tuning else 0)
            env = env.replace(partition={**env.partition.model_dump(), "seed": seed})
        return StudyCase(env, HELD_OUT if tuning else 0.0)


class Suite(Settings):
    """Environments to compare methods on.

    Attributes:
        name: What it is called.
        description: What it is, for people.
        trials: How many runs of each method with each of its settings; settings are the chosen and the default ones.
        tuning_trials: How many runs on validation rows each setting of a grid is judged by.
        methods: Names of the methods; by default all there are.
        without: Methods that are left out by default.
        reason: Why, for the page.
        contenders: Methods of the suite's own, or other grids for those there are.
        environments: In the order of the page.
    """

    name: Name
    description: str = ""
    trials: Count = 5
    tuning_trials: Count = 2
    methods: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    reason: str = ""
    contenders: Mapping[str, Contender] = Field(default_factory=dict)
    environments: Annotated[tuple[Place, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _reason_given(self) -> Self:
        if self.without and not self.reason:
            raise ValueError("field reason: methods are left out by `without`; say why, for the page")
        return self


def suite_names() -> tuple[str, ...]:
    """The suites that come with the package.

    >>> suite_names()
    ('cross-device', 'demo', 'devices', 'natural', 'paper')
    """
    folder = resources.files("fedunfold.studies.benchmark") / "suites"
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def find_suite(name_or_path: str) -> tuple[Suite, Path]:
    """A suite by its name or its TOML file, and the folder its relative paths count from.

    Raises:
        InputError: There is none of that name, or the file is wrong; the message names the field.

    >>> find_suite("demo")[0].trials
    3
    """
    if not name_or_path.endswith(".toml"):
        if name_or_path not in suite_names():
            named = unknown("suite", name_or_path, suite_names())
            raise InputError(f"{named} A file of your own is named by a path that ends in .toml.")
        file = resources.files("fedunfold.studies.benchmark") / "suites" / f"{name_or_path}.toml"
        return Suite(**tomllib.loads(file.read_text(encoding="utf-8"))), Path()
    path = Path(name_or_path)
    try:
        return Suite(**parse_toml(read_text(path, ENVIRONMENT_BYTES))), path.parent
    except OSError as error:
        raise InputError(f"suite file {path} cannot be read ({error.strerror}); check the path.") from error
    except InputError as error:
        reason = str(error).removeprefix("Suite: ").removeprefix(f"{path}: ")
        raise InputError(f"suite file {path}: {reason}") from error

"""What settings.json must say for a run to be repeated, and which of its files must come out the same."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, explain
from fedunfold.runs.federation_snapshot import Record
from fedunfold.runs.folder import SETTINGS, recorded
from fedunfold.runs.resume import ResumeDir

OF_THE_MACHINE = (".png", ".html", "environment.toml")
"""Ends of names that are not compared: figures depend on fonts, and the description names the data from its folder."""

Value = bool | int | float | str


class InputFile(Record):
    """A file that the run was given: as it was named, where it is from the run's folder, and what was in it."""

    given: str
    path: str
    sha256: str


class RunManifest(Record):
    """The part of settings.json that a run is repeated by."""

    command: Literal["demo", "learn", "run", "compare", "reproduce"]
    arguments: dict[str, Value | list[Value]]
    inputs: tuple[InputFile, ...]
    machine: dict[str, Any]
    threads: Count
    files: tuple[str, ...]

    @classmethod
    def of(cls, run: Path) -> Self:
        """Of the run in a folder, which has ended."""
        settings = recorded(run)
        if settings is None:
            raise InputError(f"{run} is not a run folder: it has no {SETTINGS}; `fedunfold learn` makes one.")
        if ResumeDir(run).exists:
            raise InputError(f"the run in {run} has not ended; go on with it first, by the same command.")
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            told = explain(error, f"{run / SETTINGS}: ")
            raise InputError(f"{told}, so that the run cannot be repeated; run it anew.") from error

    @property
    def compared(self) -> list[str]:
        """Files that are compared byte by byte."""
        return [name for name in self.files if not name.endswith(OF_THE_MACHINE)]


def is_taken(folder: Path) -> bool:
    """Whether a run that has ended is there; one that has not is gone on with."""
    return recorded(folder) is not None and not ResumeDir(folder).exists

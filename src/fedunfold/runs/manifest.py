"""What a run is repeated by, in its settings.json."""

from typing import Any, Literal

from fedunfold.core.settings import Count
from fedunfold.runs.schema import ENVIRONMENT, Record

MACHINE_DEPENDENT = (".png", ".html", ENVIRONMENT)
"""Ends of names that are not compared: figures depend on fonts, and the description names the data from its folder."""

Value = bool | int | float | str


class InputFile(Record):
    """A file that the run was given.

    Attributes:
        given: Its name as it was given.
        path: Where it is, from the run's folder.
        sha256: Of its content.
    """

    given: str
    path: str
    sha256: str


class RunManifest(Record):
    """The part of settings.json that a run is repeated by.

    Attributes:
        command: What was run.
        arguments: Its settings by their names.
        inputs: The files among them.
        machine: What it was run on and with.
        threads: How many it computed with.
        files: Names of the files that the run left.
    """

    command: Literal["demo", "learn", "run", "compare", "reproduce", "benchmark", "pretrain"]
    arguments: dict[str, Value | list[Value]]
    inputs: tuple[InputFile, ...]
    machine: dict[str, Any]
    threads: Count
    files: tuple[str, ...]

    @property
    def compared(self) -> list[str]:
        """Files that come out the same, byte by byte, wherever the run is repeated."""
        return [name for name in self.files if not name.endswith(MACHINE_DEPENDENT)]

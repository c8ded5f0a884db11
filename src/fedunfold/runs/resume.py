"""What a command was asked for, and the folder of a run that has not ended."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError, WriteError
from fedunfold.io.atomic import size_of
from fedunfold.io.checkpoint import first_difference, read_record, write_record
from fedunfold.runs.system_info import machine
from fedunfold.version import VERSION

log = logging.getLogger(__name__)
UNFINISHED = "unfinished"
"""The folder, in that of a run, of where it stands."""


@dataclass(frozen=True)
class RunSpec:
    """All that decides what a command computes: asked the same again, it gives the same bytes.

    `arguments` are the values of its options and arguments by their names, `files` those of them that are files.
    `threads` is how many were asked for, `device` where it computes.
    """

    command: str
    arguments: Mapping[str, Any]
    environment: Environment | None = None
    files: tuple[str, ...] = ()
    threads: int | None = None
    device: str = "cpu"
    digests: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digests", {name: digest_of_file(Path(name)) for name in self.files})

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal where the same is asked for, wherever data and folder lie."""
        found: dict[str, Any] = {"version": VERSION, "command": self.command, "arguments": dict(self.arguments)}
        found |= {"files": dict(self.digests), "threads": self.threads}
        if self.environment is not None:
            described = self.environment.model_dump(mode="json", exclude={"data": {"path", "data"}})
            found |= {"environment": described, "data": self.environment.load().checksum}
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def recorded_in(self, folder: Path) -> dict[str, Any]:
        """What settings.json says, so that the run can be repeated; files are named from the folder."""
        found: dict[str, Any] = {
            "arguments": dict(self.arguments),
            "inputs": [
                {"given": name, "path": os.path.relpath(name, folder), "sha256": digest}
                for name, digest in self.digests.items()
            ],
            "machine": machine(self.device),
        }
        if self.environment is not None:
            found["data"] = self.environment.load().checksum
        return found


def digest_of_file(path: Path) -> str:
    """SHA-256 of its content."""
    try:
        size_of(path)  # refuses what has no end
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path.") from error


class ResumeDir:
    """The folder `unfinished` in that of a run: what was asked for, and checkpoints."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / UNFINISHED
        self._record = self.folder / "asked.json"

    @property
    def exists(self) -> bool:
        return self._record.exists()

    def is_of(self, asked: RunSpec) -> bool:
        """Whether the same was asked for here."""
        return self.exists and self._difference(asked) is None

    def threads(self, asked: RunSpec, *, discard_others: bool) -> int | None:
        """How many threads the unfinished run computes with, which is gone on from; None where there is none.

        That of other settings is refused, or discarded.
        """
        if not self.exists:
            return None
        difference = self._difference(asked)
        if difference is None:
            log.info("going on with the unfinished run in %s", self.run)
            return int(self._read()["threads"])
        if not discard_others:
            raise InputError(
                f"{self.run} holds an unfinished run of other settings ({difference}); begin anew with --overwrite, or "
                "choose another --out."
            )
        return None

    def begin(self, asked: RunSpec) -> int:
        """Make the folder anew; how many threads the run computes with: those asked for, or as many as torch has."""
        self.discard()
        threads = asked.threads or torch.get_num_threads()
        try:
            write_record(self._record, {"asked": asked.identity(), "threads": threads}, indent=2)
        except WriteError:
            self.discard()
            raise
        return threads

    @property
    def has_checkpoints(self) -> bool:
        return any(self.folder.glob("*.safetensors"))

    def discard(self) -> None:
        """Take the folder away, the record last: as long as it is there, the same command goes on."""
        try:
            for file in self.folder.glob("*"):
                if file != self._record:
                    file.unlink()
            self._record.unlink(missing_ok=True)
            if self.folder.exists():
                self.folder.rmdir()
        except OSError as error:
            raise WriteError(f"cannot remove {self.folder}: {error.strerror}; delete it by hand.") from error

    def _read(self) -> dict[str, Any]:
        return read_record(self._record, {"asked", "threads"})

    def _difference(self, asked: RunSpec) -> str | None:
        return first_difference(self._read()["asked"], asked.identity())

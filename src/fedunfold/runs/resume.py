"""What a run is to compute, and where one stands that has not ended: all that resuming it needs."""

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
"""The folder, in that of a run, with its checkpoints."""


@dataclass(frozen=True)
class RunSpec:
    """All that decides what a run computes: the same specification gives the same bytes.

    Attributes:
        command: What is run.
        arguments: Its settings by their names.
        environment: What it is run on.
        files: Those of the arguments that are files.
        threads: How many threads were requested; None for as many as torch has.
        device: Where it computes.
        digests: SHA-256 of the files' contents, by their names.
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
        """Plain values that are equal where the same is computed, wherever data and folder are."""
        found: dict[str, Any] = {"version": VERSION, "command": self.command, "arguments": dict(self.arguments)}
        found |= {"files": dict(self.digests), "threads": self.threads}
        if self.environment is not None:
            described = self.environment.model_dump(mode="json", exclude={"data": {"path", "data"}})
            found |= {"environment": described, "data": self.environment.load().checksum}
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def manifest(self, folder: Path) -> dict[str, Any]:
        """What settings.json in a folder says, so that the run can be repeated; paths are relative to the folder."""
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
    """SHA-256 of a file's content.

    Raises:
        InputError: It cannot be read, or is no plain file.
    """
    try:
        size_of(path)  # refuses what has no end
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path.") from error


class ResumeDir:
    """The folder `unfinished` in that of a run: its specification and its checkpoints.

    Attributes:
        run: The run's folder.
        folder: The folder in it.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / UNFINISHED
        self._record = self.folder / "run_spec.json"

    @property
    def exists(self) -> bool:
        """Whether there is a run to be resumed."""
        return self._record.exists()

    @property
    def has_checkpoints(self) -> bool:
        """Whether some of its work is saved."""
        return any(self.folder.rglob("*.safetensors"))

    def is_of(self, spec: RunSpec) -> bool:
        """Whether the run to be resumed has this specification."""
        return self.exists and self._difference(spec) is None

    def resume(self, spec: RunSpec, *, discard_others: bool) -> int | None:
        """How many threads the run to be resumed computes with; None where there is none.

        Args:
            spec: What it has to be.
            discard_others: Whether one of another specification counts as none.

        Raises:
            InputError: There is one of another specification.
        """
        if not self.exists:
            return None
        difference = self._difference(spec)
        if difference is None:
            log.info("resuming the unfinished run in %s", self.run)
            return int(self._read()["threads"])
        if not discard_others:
            raise InputError(
                f"{self.run} holds an unfinished run of other settings ({difference}); start over with "
                "`overwrite=True`, or choose another `out`."
            )
        return None

    def begin(self, spec: RunSpec) -> int:
        """Make the folder anew; how many threads the run computes with: those requested, or as many as torch has."""
        self.discard()
        threads = spec.threads or torch.get_num_threads()
        try:
            write_record(self._record, {"spec": spec.identity(), "threads": threads}, indent=2)
        except WriteError:
            self.discard()
            raise
        return threads

    def discard(self) -> None:
        """Remove the folder, the specification last: as long as it exists, the run can be resumed."""
        try:
            for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder comes before it
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif path != self._record:
                    path.unlink()
            self._record.unlink(missing_ok=True)
            if self.folder.exists():
                self.folder.rmdir()
        except OSError as error:
            raise WriteError(f"cannot remove {self.folder}: {error.strerror}; delete it by hand.") from error

    def _read(self) -> dict[str, Any]:
        return read_record(self._record, {"spec", "threads"})

    def _difference(self, spec: RunSpec) -> str | None:
        return first_difference(self._read()["spec"], spec.identity())

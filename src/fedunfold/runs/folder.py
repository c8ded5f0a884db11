"""The one writer of a run folder: settings, records, weights and figures, each whole or not at all."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from fedunfold.config import Environment
from fedunfold.core.errors import DivergenceError, InputError, WriteError
from fedunfold.core.task import PrimaryMetric
from fedunfold.engines.simulation import kernel_name
from fedunfold.engines.simulation.backends.cpu import is_built
from fedunfold.io.atomic import FolderLock, InUseError, remove_stale_temp_files
from fedunfold.runs.artifacts import Files, text_writer
from fedunfold.runs.reader import holds_run, list_files
from fedunfold.runs.resume import UNFINISHED, ResumeDir, RunSpec
from fedunfold.runs.schema import ENVIRONMENT, FEDERATION, SETTINGS, FederationRecord, file_name
from fedunfold.version import VERSION


class RunFolder(AbstractContextManager["RunFolder"]):
    """A folder for one run: checked before the work begins, and locked until it ends.

    Used around the work and its writing, it removes an empty folder that it made where the work fails. settings.json
    is the last file written and names the others, so that a later run can replace this one and nothing else.

    Attributes:
        path: The folder.
        spec: What the run computes.
        threads: How many threads it computes with: those it was begun with, where it is resumed.

    Args:
        path: The folder; it is made where there is none.
        spec: What the run computes; an unfinished run of the same specification is resumed.
        overwrite: Replace the run that is in the folder.
        resume: Refuse to begin anew.

    Raises:
        InputError: The folder holds a run that is not to be overwritten, or none to be resumed.
        InUseError: Another process writes to it.
        WriteError: It cannot be written to.
    """

    def __init__(self, path: Path, spec: RunSpec, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path, self.spec = path, spec
        self._made = make_writable(path)
        self._lock: FolderLock | None = None
        self._unfinished = ResumeDir(path)
        try:
            self._lock = FolderLock(path)
            remove_stale_temp_files(path, UNFINISHED)
            self.threads = self._open(overwrite, resume)
        except BaseException:
            self._leave()
            raise

    def _open(self, overwrite: bool, resume: bool) -> int:
        """Resume or begin the run; how many threads it computes with."""
        found = self._unfinished.resume(self.spec, discard_others=overwrite and not resume)
        if found is not None:
            return found
        if resume:
            raise InputError(f"{self.path} holds no run to resume; begin it without `resume`.")
        if holds_run(self.path) and not overwrite:
            raise InputError(
                f"{self.path} already holds a run; choose another `out`, or replace it with `overwrite=True`."
            )
        return self._unfinished.begin(self.spec)

    @property
    def checkpoints(self) -> Path:
        """Where the work saves what resuming it needs."""
        return self._unfinished.folder

    @property
    def has_checkpoints(self) -> bool:
        """Whether some of the work is saved there."""
        return self._unfinished.has_checkpoints

    @staticmethod
    def named(name: str) -> Path:
        """The folder of a run that was given none."""
        return Path("runs", file_name(name))

    @classmethod
    def unused(cls, name: str, spec: RunSpec, *, resume: bool = False) -> "RunFolder":
        """The folder of that name in runs/, numbered where it is taken.

        Args:
            name: What it is called, where it is free.
            spec: What the run computes; the first folder with an unfinished run of this specification is taken, unless
                another process writes to it.
            resume: Refuse to begin anew.

        Raises:
            InputError: There is no such run, and `resume` was set.
        """
        for path in map(cls.named, numbered(name)):
            if not path.exists():
                break
            if ResumeDir(path).is_of(spec):
                with suppress(InUseError):
                    return cls(path, spec, resume=resume)
        if resume:
            raise InputError(f"no folder {cls.named(name)} holds this run unfinished; begin it without `resume`.")
        return cls(path, spec)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What diverged would do so again. Whatever else ended the work, a checkpoint is worth saving.
        if kind is None or issubclass(kind, DivergenceError) or not self._unfinished.has_checkpoints:
            self._unfinished.discard()
        self._leave(failed=kind is not None)

    def _leave(self, *, failed: bool = True) -> None:
        if failed and self._made:
            with suppress(OSError):  # what is not empty stays
                self.path.rmdir()
        if self._lock is not None:
            self._lock.release()

    def write(self, environment: Environment, files: Files, **settings: Any) -> list[Path]:
        """Write the run in place of the one before: its files, its federation and environment, settings.json last.

        Args:
            environment: What it was run on; environment.toml is written unless its data are in memory.
            files: What the work left, from `artifacts`.
            settings: What else settings.json says.

        Returns:
            All files that are the run's now.
        """
        files = {**files, FEDERATION: text_writer(FederationRecord.of(environment).model_dump_json(indent=2) + "\n")}
        if environment.data.source != "memory":
            files = {**files, ENVIRONMENT: text_writer(environment.to_toml(self.path))}
        content = {
            "environment": environment.name,
            "seed": environment.seed,
            "metric": PrimaryMetric.of(environment.load().task).describe(),
            "version": VERSION,
            "kernel": kernel_name(environment),
            "compiled_backend": is_built(),
            **settings,
        }
        return self.write_files(files, content)

    def write_files(self, files: Files, content: Mapping[str, Any]) -> list[Path]:
        """Write files in place of those of the run before, settings.json last.

        Args:
            files: What the work left, from `artifacts`.
            content: What settings.json says beside what the run computed.

        Returns:
            All files that are the run's now.
        """
        for name, write in files.items():
            write(self.path / name)
        for file in list_files(self.path):  # what the run before left and this one did not replace
            if file.name not in files and file.name != SETTINGS:
                file.unlink()
        write_settings(self.path, self.spec, self.threads, files, content)
        return list_files(self.path)


def numbered(name: str) -> Iterator[str]:
    """A name, and the same with a number for where it is taken.

    >>> names = numbered("demo")
    >>> next(names), next(names), next(names)
    ('demo', 'demo-2', 'demo-3')
    """
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def write_settings(
    folder: Path, spec: RunSpec, threads: int, files: Iterable[str], more: Mapping[str, Any] | None = None
) -> None:
    """Write settings.json: what a run computed and is repeated by, where it was made, and what it left.

    Args:
        folder: The run's folder.
        spec: What was computed.
        threads: How many threads it computed with.
        files: Names of the files it left.
        more: What else it says.
    """
    content = {
        "command": spec.command,
        **(more or {}),
        **spec.manifest(folder),
        "threads": threads,
        "files": list(files),
    }
    text_writer(json.dumps(content, indent=2, default=asdict) + "\n")(folder / SETTINGS)


def make_writable(folder: Path) -> bool:
    """Find out now rather than after the work whether a folder can be written to.

    Returns:
        True where the folder was made for that.

    Raises:
        WriteError: It cannot be.
    """
    new = False
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fedunfold-probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may try the same
    except OSError as error:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise WriteError(
            f"cannot write to the output folder {folder}: {error.strerror}; choose another `out`."
        ) from error
    return new

"""The folder a run leaves behind: settings, metrics as JSON lines, weights, figures."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialize

from fedunfold import plotting
from fedunfold.config import Environment
from fedunfold.core.errors import DivergenceError, InputError, WriteError
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import kernel_name
from fedunfold.engines.simulation.backends.cpu import is_built
from fedunfold.io.atomic import (
    FolderLock,
    InUseError,
    is_plain_file,
    read_json,
    remove_stale_temp_files,
    write_atomically,
)
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.federation_snapshot import FEDERATION, FederationRecord
from fedunfold.runs.resume import UNFINISHED, ResumeDir, RunSpec
from fedunfold.tracking.scalars import iteration_records, round_record
from fedunfold.training.compare import Comparison, client_accuracies, trained_module
from fedunfold.version import VERSION

SETTINGS = "settings.json"
REPORT = "report.html"  # made later, from the others; it goes when they go
MODEL = "model.safetensors"
METRICS = "metrics.jsonl"
CLIENT_ACCURACY = "client_accuracy.jsonl"
LEARNED = "weights"  # the name of the file, before its ending, that `learn` gives

Files = Mapping[str, Callable[[Path], object]]
"""What a run leaves: the name of each file, and how it is written there, whole or not at all."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """A folder for one run, ready to be written to before the work begins, and locked until it ends.

    Used around the work and its writing, it takes an empty folder of its own away again where the work fails.
    settings.json is the last file written and names the others, so that a later run can replace this one and nothing
    else. A run that did not end is gone on from where the same is `asked` for again; `resume` insists on that.
    """

    def __init__(self, path: Path, asked: RunSpec, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path, self.asked = path, asked
        self._made = make_writable(path)
        self._lock: FolderLock | None = None
        self._unfinished = ResumeDir(path)
        try:
            self._lock = FolderLock(path)
            remove_stale_temp_files(path, UNFINISHED)
            self.threads = self._opened(overwrite, resume)
        except BaseException:
            self._leave()
            raise

    def _opened(self, overwrite: bool, resume: bool) -> int:
        """How many threads the run computes with that is gone on with or begun."""
        found = self._unfinished.threads(self.asked, discard_others=overwrite and not resume)
        if found is not None:
            return found
        if resume:
            raise InputError(f"{self.path} holds nothing to go on from; leave out --resume to begin.")
        if recorded(self.path) is not None and not overwrite:
            raise InputError(f"{self.path} already holds a run; choose another --out, or replace it with --overwrite.")
        return self._unfinished.begin(self.asked)

    @property
    def checkpoints(self) -> Path:
        """Where the work keeps what it needs to go on."""
        return self._unfinished.folder

    @staticmethod
    def named(name: str) -> Path:
        """Where a run goes that was given no folder."""
        return Path("runs", file_name(name))

    @classmethod
    def unused(cls, name: str, asked: RunSpec, *, resume: bool = False) -> "RunFolder":
        """The folder of that name in runs/, numbered where it is taken, whose unfinished run is the same; or a new one.

        One that another process is writing to is passed by.
        """
        path, number = cls.named(name), 1
        while path.exists():
            if ResumeDir(path).is_of(asked):
                with suppress(InUseError):
                    return cls(path, asked, resume=resume)
            number += 1
            path = cls.named(f"{name}-{number}")
        if resume:
            raise InputError(f"no folder {cls.named(name)} holds this run unfinished; leave out --resume to begin it.")
        return cls(path, asked)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What diverged would do so again. Whatever else ended the work, a checkpoint is worth keeping.
        if kind is None or issubclass(kind, DivergenceError) or not self._unfinished.has_checkpoints:
            self._unfinished.discard()
        self._leave(failed=kind is not None)

    def _leave(self, *, failed: bool = True) -> None:
        if failed and self._made:
            with suppress(OSError):  # what is not empty stays
                self.path.rmdir()
        if self._lock is not None:
            self._lock.release()

    def write(self, environment: Environment, files: Files, **settings: Any) -> None:
        """The files, what the federation is, environment.toml where there can be one, and settings.json, in place of
        the run before."""
        files = {**files, FEDERATION: _text(FederationRecord.of(environment).model_dump_json(indent=2) + "\n")}
        if environment.data.source != "memory":
            files = {**files, "environment.toml": _text(environment.to_toml(self.path))}
        content = {
            "environment": environment.name,
            "seed": environment.seed,
            "version": VERSION,
            "kernel": kernel_name(environment),
            "compiled_walk": is_built(),
            **settings,
        }
        for name, write in files.items():
            write(self.path / name)
        self._clear(but=files)
        write_settings(self.path, self.asked, self.threads, files, content)

    def _clear(self, but: Files) -> None:
        """Remove what the run before left and this one did not replace."""
        for file in recorded_files(self.path):
            if file.name not in but and file.name != SETTINGS:
                file.unlink()


def write_settings(
    folder: Path, asked: RunSpec, threads: int, files: Iterable[str], more: Mapping[str, Any] | None = None
) -> None:
    """settings.json: what a run was and is repeated by, where it was made, and what it left."""
    content = {
        "command": asked.command,
        **(more or {}),
        **asked.recorded_in(folder),
        "threads": threads,
        "files": list(files),
    }
    _text(json.dumps(content, indent=2, default=asdict) + "\n")(folder / SETTINGS)


def make_writable(folder: Path) -> bool:
    """Find out now rather than after the work whether a folder can be written to; True where it was made for that."""
    new = False
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fedunfold-probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may be asking the same
    except OSError as error:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise WriteError(
            f"cannot write to the output folder {folder}: {error.strerror}; choose another with --out."
        ) from error
    return new


def recorded(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; none where there is no run, empty where they cannot be read."""
    try:
        content = read_json(folder / SETTINGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, InputError):
        return {}
    return content if isinstance(content, dict) else {}


def recorded_files(folder: Path) -> list[Path]:
    """The files of the run in a folder that are there, settings.json last; never one outside, whatever is listed."""
    listed = (recorded(folder) or {}).get("files")
    known = *(listed if isinstance(listed, list) else ()), REPORT, SETTINGS
    named = (folder / str(name) for name in known)
    return [file for file in dict.fromkeys(named) if file.parent == folder and is_plain_file(file)]


def of_learning(learned: LearnedWeights) -> Files:
    """weights.safetensors, the outer loss of every iteration, and two figures."""
    return {
        f"{LEARNED}.safetensors": learned.save,
        METRICS: _lines(iteration_records(learned)),
        "weights.png": partial(plotting.save, plotting.weights(learned)),
        "outer_loss.png": partial(plotting.save, plotting.outer_loss(learned)),
    }


def of_run(environment: Environment, method: str, result: RunResult) -> Files:
    """metrics.jsonl with a line for each round, how each client is served in the end, and the trained model."""
    state = trained_module(environment, result).state_dict()
    model = serialize({name: tensor.contiguous() for name, tensor in state.items()})
    return {
        METRICS: _lines(_rounds(method, 0, result)),
        CLIENT_ACCURACY: _lines(_clients(environment, method, [result])),
        MODEL: lambda path: write_atomically(path, lambda temporary: temporary.write_bytes(model)),
    }


def of_comparison(environment: Environment, comparison: Comparison, unfinished: Mapping[str, LearnedWeights]) -> Files:
    """result.json, records, figures, and all weights that were learned, also of methods not run yet."""
    files: dict[str, Callable[[Path], object]] = {}
    if comparison.methods:
        files["result.json"] = _text(json.dumps(comparison.as_json(), indent=2) + "\n")
        files[METRICS] = _lines(
            line
            for result in comparison.methods
            for trial, outcome in enumerate(result.trials)
            for line in _rounds(result.name, trial, outcome)
        )
        files[CLIENT_ACCURACY] = _lines(
            line for result in comparison.methods for line in _clients(environment, result.name, result.trials)
        )
        files["accuracy.png"] = partial(plotting.save, plotting.accuracy(comparison))
    finished = {result.name: result.learned for result in comparison.methods if result.learned is not None}
    for name, learned in {**unfinished, **finished}.items():
        stem = file_name(name)
        files[f"{stem}.safetensors"] = learned.save
        files[f"{stem}-weights.png"] = partial(plotting.save, plotting.weights(learned))
        files[f"{stem}-outer-loss.png"] = partial(plotting.save, plotting.outer_loss(learned))
    return files


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _lines(records: Iterable[Mapping[str, Any]]) -> Callable[[Path], object]:
    return _text("".join(json.dumps(record) + "\n" for record in records))


def file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", name)


def _rounds(method: str, trial: int, result: RunResult) -> Iterable[Mapping[str, Any]]:
    for t, evaluation in enumerate(result.evaluations):
        yield {
            **round_record(method, trial, t, evaluation),
            "weights": result.weights[t].tolist(),
            "present": result.participated[t].tolist(),
            "rejected": {entry.client: entry.reason for entry in result.rejected if entry.round == t},
        }


def _clients(environment: Environment, method: str, results: Sequence[RunResult]) -> Iterable[Mapping[str, Any]]:
    """Accuracy of the final models on each client's own training data, in percent."""
    for trial, accuracies in enumerate(client_accuracies(environment, results)):
        yield {"method": method, "trial": trial, "client_accuracy": [100 * accuracy for accuracy in accuracies]}

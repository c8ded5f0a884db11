"""The folder a run leaves behind: settings, metrics as JSON lines, weights, figures."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialize

from fedunfold.environments import Environment
from fedunfold.errors import InputError
from fedunfold.experiments.comparing import Comparison, trained_module
from fedunfold.files import is_plain_file, read_json, write_atomically
from fedunfold.report import figures
from fedunfold.rounds import RunResult
from fedunfold.simulation import kernel_name
from fedunfold.version import VERSION
from fedunfold.weighting.learned import LearnedWeights

SETTINGS = "settings.json"
MODEL = "model.safetensors"

Files = Mapping[str, Callable[[Path], object]]
"""What a run leaves: the name of each file, and how it is written there, whole or not at all."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """A folder for one run, ready to be written to before the work begins.

    Used around the work, it takes an empty folder of its own away again where the work fails. settings.json is
    the last file written and names the others, so that a later run can replace this one and nothing else.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self._made = make_writable(path)
        if recorded(path) is not None and not overwrite:
            raise InputError(f"{path} already holds a run; choose another --out, or replace it with --overwrite.")

    @staticmethod
    def named(name: str) -> Path:
        """Where a run goes that was given no folder."""
        return Path("runs", _file_name(name))

    @classmethod
    def unused(cls, name: str) -> "RunFolder":
        """A new folder of that name in runs/, numbered where the name is taken."""
        path, number = cls.named(name), 1
        make_writable(path.parent)
        while not _take(path):
            number += 1
            path = cls.named(f"{name}-{number}")
        folder = cls(path)
        folder._made = True
        return folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._made:
            with suppress(OSError):  # what is not empty stays
                self.path.rmdir()

    def write(self, command: str, environment: Environment, files: Files, **settings: Any) -> None:
        """The files, environment.toml where there can be one, and settings.json, in place of the run before."""
        if environment.data.source != "memory":
            files = {**files, "environment.toml": _text(environment.to_toml(self.path))}
        content = {
            "command": command,
            "environment": environment.name,
            "seed": environment.seed,
            "version": VERSION,
            "kernel": kernel_name(environment),
            **settings,
            "files": list(files),
        }
        self._clear()
        for name, write in files.items():
            write(self.path / name)
        _text(json.dumps(content, indent=2, default=asdict) + "\n")(self.path / SETTINGS)

    def _clear(self) -> None:
        listed = (recorded(self.path) or {}).get("files")
        for name in (*(listed if isinstance(listed, list) else ()), SETTINGS):
            file = self.path / str(name)
            if file.parent == self.path and is_plain_file(file):
                file.unlink()


def make_writable(folder: Path) -> bool:
    """Find out now rather than after the work whether a folder can be written to; True where it was made for that."""
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fedunfold-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to the output folder {folder}: {error.strerror}; choose another with --out."
        ) from error
    return new


def _take(folder: Path) -> bool:
    """Make a folder that was not there: two calls at the same time get one each."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def recorded(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; none where there is no run, empty where they cannot be read."""
    try:
        content = read_json(folder / SETTINGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def of_learning(learned: LearnedWeights) -> Files:
    """weights.safetensors, the outer loss of every iteration, and two figures."""
    return {
        "weights.safetensors": learned.save,
        "metrics.jsonl": _lines({"iteration": m, "outer_loss": loss} for m, loss in enumerate(learned.losses.tolist())),
        "weights.png": partial(figures.save, figures.weights(learned)),
        "outer_loss.png": partial(figures.save, figures.outer_loss(learned)),
    }


def of_run(environment: Environment, method: str, result: RunResult) -> Files:
    """metrics.jsonl with a line for each round, and the trained model."""
    state = trained_module(environment, result).state_dict()
    model = serialize({name: tensor.contiguous() for name, tensor in state.items()})
    return {
        "metrics.jsonl": _lines(_rounds(method, 0, result)),
        MODEL: lambda path: write_atomically(path, lambda temporary: temporary.write_bytes(model)),
    }


def of_comparison(comparison: Comparison, unfinished: Mapping[str, LearnedWeights]) -> Files:
    """result.json, metrics.jsonl, figures, and all weights that were learned, also of methods not run yet."""
    files: dict[str, Callable[[Path], object]] = {}
    if comparison.methods:
        files["result.json"] = _text(json.dumps(comparison.as_json(), indent=2) + "\n")
        files["metrics.jsonl"] = _lines(
            line
            for result in comparison.methods
            for trial, outcome in enumerate(result.trials)
            for line in _rounds(result.name, trial, outcome)
        )
        files["accuracy.png"] = partial(figures.save, figures.accuracy(comparison))
    finished = {result.name: result.learned for result in comparison.methods if result.learned is not None}
    for name, learned in {**unfinished, **finished}.items():
        stem = _file_name(name)
        files[f"{stem}.safetensors"] = learned.save
        files[f"{stem}-weights.png"] = partial(figures.save, figures.weights(learned))
        files[f"{stem}-outer-loss.png"] = partial(figures.save, figures.outer_loss(learned))
    return files


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _lines(records: Iterable[Mapping[str, Any]]) -> Callable[[Path], object]:
    return _text("".join(json.dumps(record) + "\n" for record in records))


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", name)


def _rounds(method: str, trial: int, result: RunResult) -> Iterable[Mapping[str, Any]]:
    for t, evaluation in enumerate(result.evaluations):
        yield {
            "method": method,
            "trial": trial,
            "round": t,
            "accuracy": 100 * evaluation.accuracy,
            "loss": evaluation.loss,
            "class_accuracy": [
                None if math.isnan(value) else 100 * value for value in evaluation.class_accuracy.tolist()
            ],
            "weights": result.weights[t].tolist(),
            "present": result.present[t].tolist(),
        }

"""The folder a run leaves behind: settings, metrics as JSON lines, weights, figures."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedunfold.environments import Environment
from fedunfold.errors import InputError
from fedunfold.experiments.comparing import Comparison
from fedunfold.files import write_atomically
from fedunfold.report import figures
from fedunfold.rounds import RunResult
from fedunfold.version import VERSION
from fedunfold.weighting.learned import LearnedWeights


class RunFolder:
    """One run's files. Each is written whole or not at all, and replaces one of the same name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".fedunfold-probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"cannot write to the output folder {path}: {error.strerror}; choose another with --out."
            ) from error

    def settings(self, command: str, environment: Environment, **settings: Any) -> None:
        """settings.json, and environment.toml where the environment can be written down."""
        content = {
            "command": command,
            "environment": environment.name,
            "seed": environment.seed,
            "version": VERSION,
            **settings,
        }
        self._text("settings.json", json.dumps(content, indent=2, default=asdict) + "\n")
        if environment.data.source != "memory":
            self._text("environment.toml", environment.to_toml(self.path))

    def learned(self, learned: LearnedWeights) -> Path:
        """weights.safetensors, the metrics of its learning, and two figures."""
        self._lines(
            "metrics.jsonl",
            (
                {"iteration": m, "outer_loss": loss, "weights": rows}
                for m, (loss, rows) in enumerate(zip(learned.losses.tolist(), learned.history.tolist(), strict=False))
            ),
        )
        figures.save(figures.weights(learned), self.path / "weights.png")
        figures.save(figures.outer_loss(learned), self.path / "outer_loss.png")
        file = self.path / "weights.safetensors"
        learned.save(file)
        return file

    def run(self, method: str, result: RunResult) -> None:
        """metrics.jsonl with a line for each round."""
        self._lines("metrics.jsonl", _rounds(method, 0, result))

    def comparison(self, comparison: Comparison) -> None:
        """result.json, metrics.jsonl, figures, and the weights of every method that learned some."""
        self._text("result.json", json.dumps(comparison.as_json(), indent=2) + "\n")
        self._lines(
            "metrics.jsonl",
            (
                line
                for result in comparison.methods
                for trial, outcome in enumerate(result.trials)
                for line in _rounds(result.name, trial, outcome)
            ),
        )
        figures.save(figures.accuracy(comparison), self.path / "accuracy.png")
        for result in comparison.methods:
            if result.learned is not None:
                self.weights(result.name, result.learned)

    def weights(self, name: str, learned: LearnedWeights) -> None:
        """The weights of one of several methods, and their figures."""
        stem = re.sub(r"[^A-Za-z0-9._=-]+", "-", name)
        learned.save(self.path / f"{stem}.safetensors")
        figures.save(figures.weights(learned), self.path / f"{stem}-weights.png")
        figures.save(figures.outer_loss(learned), self.path / f"{stem}-outer-loss.png")

    def _text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def _lines(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        self._text(name, "".join(json.dumps(record) + "\n" for record in records))


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

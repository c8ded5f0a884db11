"""A run's events as lines of JSON, each written when it happens: for `tail -f`, and for what a crash leaves."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import finite
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking.callback import Callback
from fedunfold.tracking.scalars import iteration_records, mean_weights, round_record

PROGRESS = "progress.jsonl"


class JsonLines(Callback):
    """Appends to a file: settings, then a line for each outer iteration, round and trial.

    `seconds` is the time since the run began. Nothing is written before the first line about work done, so that a run
    refused or stopped before leaves no file. The file is removed once the run's own records are saved: these say the
    same, without times, and the same run gives the same bytes.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        self._settings: Mapping[str, Any] | None = None

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self._began, self._settings = time.monotonic(), settings

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        weights = mean_weights(so_far.weights, so_far.client_ids)
        self._write({"method": method, **iteration_records(so_far)[-1], "mean_weights": weights})

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
        self._write(round_record(method, trial, round_index, evaluation))

    def on_pretraining_step(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, **values})

    def on_fine_tuning_step(self, step: int, steps: int, loss: float) -> None:
        self._write({"step": step, "validation_loss": finite(loss)})

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        last = result.evaluations[-1]
        score = {last.primary.name: finite(last.primary.factor() * last.score)}
        self._write({"method": method, "trial": trial, **score, "weights": result.weights.tolist()})

    def on_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write({"table": list(rows)})

    def on_artifacts(self, files: Sequence[Path]) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, record: Mapping[str, Any]) -> None:
        lines: list[Mapping[str, Any]] = [] if self._settings is None else [{"began": self._settings}]
        lines.append({**record, "seconds": round(time.monotonic() - self._began, 3)})
        with self.path.open("a", encoding="utf-8") as file:  # closed at once: the line is there for other readers
            if self._settings is not None and file.tell():
                file.write("\n")  # a run that was killed here may have left half a line
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self._settings = None

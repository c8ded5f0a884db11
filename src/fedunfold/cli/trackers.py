"""Who follows a run: the terminal, and what `--track` names beside it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from fedunfold.cli import console
from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.registry import unknown
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.folder import RunFolder, numbered
from fedunfold.tracking import Callback, CallbackList
from fedunfold.tracking.jsonl import PROGRESS, JsonLines
from fedunfold.tracking.mlflow import MLflow
from fedunfold.tracking.tensorboard import TensorBoard
from fedunfold.training.comparison import Comparison, MethodResult

RUNS = Path("runs")


class ProgressTracker(Callback):
    """Shows where a run stands, within `bars`, and keeps what is done so far for an interruption."""

    def __init__(self) -> None:
        self.bars = console.progress()
        self._tasks: dict[str, TaskID] = {}
        self._rounds = 0
        self._validated = ""
        self.steps_made = 0  # of pre-training or fine-tuning, those before an interruption included
        self.rounds_made = 0  # of the last trial, those before an interruption included
        self.learned: dict[str, LearnedWeights] = {}
        self.runs: dict[str, list[RunResult]] = {}

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self._rounds = settings.get("rounds", 0) * settings.get("trials", 1)

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self.learned[method] = so_far
        task = self._task(f"{method}: learning weights", iterations)
        self.bars.update(task, completed=len(so_far.losses), note=f"outer loss {so_far.losses[-1]:.5g}")

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
        task = self._task(f"{method}: rounds", self._rounds)
        self.rounds_made = round_index + 1
        primary = evaluation.primary
        note = f"{primary.text(primary.factor() * evaluation.score)}{primary.unit()}"
        self.bars.update(task, advance=1, note=note)

    def on_pretraining_step(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        self.steps_made = step
        if "validation_mean" in values:
            self._validated = f", validation {values['validation_mean']:+.2f} points"
        note = f"loss {values['loss']:.3f} of FedAvg's{self._validated}"
        self.bars.update(self._task("pre-training", steps), completed=step, note=note)

    def on_fine_tuning_step(self, step: int, steps: int, loss: float) -> None:
        self.steps_made = step
        self.bars.update(self._task("fine-tuning", steps), completed=step, note=f"validation loss {loss:.4g}")

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self.runs.setdefault(method, []).append(result)
        # Rounds before an interruption are not reported again.
        task = self._task(f"{method}: rounds", self._rounds)
        self.bars.update(task, completed=(trial + 1) * self._rounds // trials)

    def so_far(self, environment: str, at_least: int = 1) -> Comparison:
        """The methods with at least so many finished trials."""
        results = tuple(
            MethodResult(name, tuple(runs), self.learned.get(name))
            for name, runs in self.runs.items()
            if len(runs) >= at_least
        )
        return Comparison(environment, max((len(result.trials) for result in results), default=0), results)

    def _task(self, what: str, total: int) -> TaskID:
        if what not in self._tasks:
            self._tasks[what] = self.bars.add_task(what, total=total, note="")
        return self._tasks[what]


def trackers(
    progress: ProgressTracker, name: str, folder: RunFolder | None, wanted: Sequence[str] | None
) -> CallbackList:
    """The terminal, the live file where the run has a folder, and the trackers requested, under the folder's name."""
    name = name if folder is None else folder.path.absolute().name
    live = [] if folder is None else [JsonLines(folder.path / PROGRESS)]
    return CallbackList(progress, *live, *(_tracker(where, name) for where in wanted or ()), log=console.warn)


def _tracker(wanted: str, name: str) -> Callback:
    kind, _, where = wanted.partition(":")
    if kind == "tensorboard":
        return TensorBoard(_free(Path(where) if where else RUNS / "tensorboard", name))
    if kind == "mlflow":
        # MLflow's own variable counts as it does for all its tools.
        store = where or os.environ.get("MLFLOW_TRACKING_URI") or str(RUNS / "mlflow.db")
        return MLflow(store if "://" in store else Path(store), name)
    raise InputError(unknown("tracker", kind, ["tensorboard", "mlflow"]))


def _free(logs: Path, name: str) -> Path:
    """A folder of its own for every run: TensorBoard would draw two in one as a single zigzag."""
    return next(path for path in (logs / number for number in numbered(name)) if not path.exists())

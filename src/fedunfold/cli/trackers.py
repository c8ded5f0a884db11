"""`--track`: who follows a run beside the terminal."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.cli.console import ProgressTracker
    from fedunfold.config import Environment
    from fedunfold.runs.folder import RunFolder
    from fedunfold.tracking import Callback, CallbackList

RUNS = Path("runs")


def trackers(
    progress: "ProgressTracker", environment: "Environment", folder: "RunFolder | None", wanted: Sequence[str] | None
) -> "CallbackList":
    """The terminal, the live file where the run has a folder, and the trackers requested, under the folder's name."""
    from fedunfold.cli import console
    from fedunfold.tracking import CallbackList
    from fedunfold.tracking.jsonl import PROGRESS, JsonLines

    name = f"run-{environment.name}" if folder is None else folder.path.absolute().name
    live = [] if folder is None else [JsonLines(folder.path / PROGRESS)]
    return CallbackList(progress, *live, *(_tracker(where, name) for where in wanted or ()), log=console.warn)


def report_files(tracker: "Callback", folder: "RunFolder") -> None:
    """Name the files in the folder, once they are written."""
    from fedunfold.runs.reader import list_files

    tracker.on_artifacts(list_files(folder.path))


def _tracker(wanted: str, name: str) -> "Callback":
    from fedunfold.core.registry import unknown
    from fedunfold.tracking.mlflow import MLflow
    from fedunfold.tracking.tensorboard import TensorBoard

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
    path, number = logs / name, 1
    while path.exists():
        number += 1
        path = logs / f"{name}-{number}"
    return path

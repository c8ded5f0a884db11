"""The end of a run in files, as apps write it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Result

STAGES = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"


def save_result(result: Result, folder: str) -> None:
    """Write the final model and the metrics of all rounds."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: array.numpy() for name, array in result.arrays.items()}
    np.savez(Path(folder, "model.npz"), **arrays)
    metrics = {name: {t: dict(found) for t, found in getattr(result, name).items()} for name in STAGES}
    Path(folder, "metrics.json").write_text(json.dumps(metrics))


def load_result(folder: Path) -> tuple[dict[str, Any], Any]:
    """What `save_result` wrote: arrays by name, metrics by stage and round."""
    with np.load(folder / "model.npz", allow_pickle=False) as arrays:
        return dict(arrays), json.loads((folder / "metrics.json").read_text())

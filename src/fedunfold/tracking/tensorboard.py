"""A run in TensorBoard's event files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedunfold.core.extras import import_extra
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking.scalars import Scalar, ScalarCallback, flattened


class TensorBoard(ScalarCallback):
    """Writes a run to a folder of its own in TensorBoard's log directory; nothing is made before the work begins.

    Scalars: those of `ScalarCallback`. Histograms: the weights of all clients, a step for each round. Texts: `settings`
    and `results`; the settings are hyperparameters too. Figures that the run leaves become images.

    Args:
        folder: The folder.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        otherwise = "tracking with TensorBoard needs it: pip install 'fedunfold[tracking]'."
        self.folder = folder
        self._open = import_extra("torch.utils.tensorboard.writer", otherwise).SummaryWriter
        self._learned: dict[str, LearnedWeights] = {}

    def on_start(self, settings: Mapping[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        super().on_start(settings)
        self._writer = self._open(str(self.folder))
        flat = flattened(settings)
        self._writer.add_text("settings", _markdown([{"setting": name, "value": flat[name]} for name in flat]))
        self._summary(hparams_pb({name: _plain(value) for name, value in flat.items()}))
        self._writer.flush()

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self._learned[method] = so_far
        super().on_outer_step(method, so_far, iterations)

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        if not result.is_reference:
            self._histograms(f"{method}/trial-{trial}/weights", result.weights)
        super().on_trial_end(method, trial, trials, result)

    def on_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("results", _markdown(rows))
        super().on_results(rows)

    def on_end(self, failure: BaseException | None) -> None:
        for method, learned in self._learned.items():
            self._histograms(f"{method}/learning/weights", learned.weights)
        self._writer.close()

    def on_artifacts(self, files: Sequence[Path]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer = self._open(str(self.folder), filename_suffix=".figures")
        for file in files:
            if file.suffix == ".png":
                image = Summary.Image(encoded_image_string=file.read_bytes())
                self._summary(Summary(value=[Summary.Value(tag=f"figures/{file.stem}", image=image)]))
        self._writer.close()

    def _summary(self, summary: Any) -> None:
        """What SummaryWriter has no method for, or none that leaves the values as they are."""
        self._writer.file_writer.add_summary(summary)

    def log_scalars(self, scalars: Sequence[Scalar]) -> None:
        for name, value, step in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _histograms(self, name: str, weights: Tensor) -> None:
        for t, row in enumerate(weights):
            self._writer.add_histogram(name, row, t)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; TensorBoard shows texts as Markdown."""
    if not rows:
        return ""
    flat = [{**row, **row.get("metrics", {})} for row in rows]
    heads = [name for name in flat[0] if name != "metrics"]
    lines = [heads, ["---"] * len(heads), *([str(row.get(name, "")) for name in heads] for row in flat)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _plain(value: Any) -> bool | float | str:
    """Hyperparameters are numbers, truth values and texts."""
    return value if isinstance(value, int | float) else str(value)

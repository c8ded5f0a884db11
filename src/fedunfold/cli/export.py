"""`fedunfold export`: a run's trained model in a format of others."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    to: Literal["safetensors", "torch-export", "onnx"] = "safetensors",
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    output: opt.Format = "text",
) -> None:
    """Write the model that a run trained, for programs that do not know this package.

    Args:
        run: The folder of a finished `fedunfold run --out`.
        to: safetensors has the parameters alone; the others are programs that take any number of rows.
        out: The file; by default exported with the format's ending, in the folder.
    """
    from fedunfold.core.errors import InputError
    from fedunfold.runs.trained_model import ENDINGS, TrainedModel

    file = out or run / f"exported{ENDINGS[to]}"
    if file.is_dir():
        raise InputError(f"{file} is a folder; name a file with --out.")
    trained = TrainedModel.load(run)
    trained.export(file, to)
    if output == "json":
        shape = list(trained.record.features)
        console.print_json({"file": str(file), "format": to, "row_shape": shape, "task": trained.task.describe()})
        return
    console.say(f"the model is in {file}; it reads rows of shape {list(trained.record.features)}.")

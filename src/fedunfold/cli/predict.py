"""`fedunfold predict`: a run's trained model on new rows of a table."""

from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    file: Annotated[Path, typer.Argument(metavar="FILE.csv")],
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    output: opt.Format = "text",
) -> None:
    """Predict for the rows of a CSV file, with the preprocessing that the training data had.

    Args:
        run: The folder of a finished `fedunfold run --out`, on an environment that `fedunfold env new` made of tables.
        file: The rows, with the columns of the training data; the label may be missing.
        out: The CSV file of the predictions; by default they are printed.
    """
    from fedunfold.runs.predictions import predict as predict_rows
    from fedunfold.runs.trained_model import TrainedModel

    found = predict_rows(TrainedModel.load(run), file)
    for text in found.notes:  # not among the predictions
        console.warn(text)
    if out is not None:
        found.write(out)
    if output == "json":
        console.print_json({"columns": found.columns, "rows": found.rows, "notes": found.notes})
    elif out is not None:
        console.say(f"{len(found.rows)} predictions are in {out}.")
    else:
        console.say(found.csv().rstrip("\n"))

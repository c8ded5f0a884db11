"""Options that several commands share, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What goes to standard output."""

    text = "text"
    json = "json"


class Adjoint(StrEnum):
    first_order = "first_order"
    exact = "exact"


class Absent(StrEnum):
    keep = "keep"
    drop = "drop"
    remember = "remember"


class AbsentLoss(StrEnum):
    evaluate = "evaluate"
    skip = "skip"


class Outer(StrEnum):
    path = "path"
    sample = "sample"
    balanced = "balanced"
    final = "final"
    final_balanced = "final-balanced"
    mse = "mse"


class Schedule(StrEnum):
    fast = "fast"
    paper = "paper"


class InitialModel(StrEnum):
    fixed = "fixed"
    resample = "resample"


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


Env = Annotated[
    str, typer.Argument(metavar="ENV", help="A bundled environment (`fedunfold env list`) or a .toml file.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
FormatOption = Annotated[
    Format, typer.Option("--format", help="text for people, json for one JSON document on stdout.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Randomness of training; who holds which data does not change."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds T, instead of the environment's.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
PrecisionOption = Annotated[Precision, typer.Option("--dtype", help="Floating-point type of the models.")]
Trials = Annotated[int, typer.Option("--trials", help="Runs of each method, each with its own randomness.")]
Update = Annotated[
    str | None,
    typer.Option("--update", metavar="PART", help="Local update: sgd, prox:mu=0.01, nova, momentum:rho=0.9."),
]
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="PART", help="Server optimiser: plain, adam:lr=0.01, yogi, adagrad."),
]
Rule = Annotated[
    str | None,
    typer.Option("--rule", metavar="PART", help="Weights: size, uniform, dr:q=1, fedadp:beta=7, fedfa."),
]
AbsentOption = Annotated[
    Absent | None,
    typer.Option("--absent", help="Absent clients: keep the old model, drop out, remember the last update."),
]
AdjointOption = Annotated[
    Adjoint, typer.Option("--adjoint", help="Gradient: first_order (one run) or exact (about four).")
]
OuterOption = Annotated[
    Outer,
    typer.Option("--outer", help="What weights are learned for; balanced counts all classes alike."),
]
AbsentLossOption = Annotated[
    AbsentLoss, typer.Option("--absent-loss", help="Whether absent clients' losses count in the learning.")
]
ScheduleOption = Annotated[
    Schedule, typer.Option("--schedule", help="Outer iterations and step: fast, or the paper's 400 × 0.001.")
]
Iterations = Annotated[int | None, typer.Option("--iterations", help="Outer iterations M.")]
OuterLr = Annotated[float | None, typer.Option("--outer-lr", help="Outer step size (Adam).")]
InitialModelOption = Annotated[
    InitialModel, typer.Option("--initial-model", help="The same in every outer iteration, or a fresh one.")
]
Fraction = Annotated[float, typer.Option("--fraction", help="Part of its data that each client gives to the learning.")]

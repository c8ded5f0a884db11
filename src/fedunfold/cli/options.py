"""Options that several commands share, each declared once.

The choices are those of the library, written down again: reading them there would load torch for `--help`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

Env = Annotated[
    str, typer.Argument(metavar="ENV", help="A bundled environment (`fedunfold env list`) or a .toml file.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds already.")]
Format = Annotated[
    Literal["text", "json"], typer.Option("--format", help="text for people, json for one JSON document on stdout.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Randomness of training; who holds which data does not change."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds T, instead of the environment's.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Precision = Annotated[Literal["float32", "float64"], typer.Option("--dtype", help="Floating-point type of the models.")]
Trials = Annotated[int, typer.Option("--trials", help="Runs of each method, each with its own randomness.")]
Update = Annotated[
    str | None,
    typer.Option("--update", metavar="PART", help="Local update: sgd, prox:mu=0.01, nova, momentum:rho=0.9."),
]
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="PART", help="Server: plain, momentum, adam:lr=0.01, yogi, adagrad."),
]
Rule = Annotated[
    str | None,
    typer.Option("--rule", metavar="PART", help="Weights: size, uniform, dr:q=1, fedadp:beta=7, fedfa."),
]
Absent = Annotated[
    Literal["keep", "drop", "remember"] | None,
    typer.Option("--absent", help="Absent clients: keep the old model, drop out, remember the last update."),
]
Adjoint = Annotated[
    Literal["first_order", "exact"],
    typer.Option("--adjoint", help="Gradient: first_order (one run) or exact (about four)."),
]
Outer = Annotated[
    Literal["path", "sample", "balanced", "final", "final-balanced", "mse"],
    typer.Option("--outer", help="What weights are learned for; balanced counts all classes alike."),
]
AbsentLoss = Annotated[
    Literal["evaluate", "skip"],
    typer.Option("--absent-loss", help="Whether absent clients' losses count in the learning."),
]
Schedule = Annotated[
    Literal["fast", "paper"],
    typer.Option("--schedule", help="Outer iterations and step: fast, or as published for the environment."),
]
Iterations = Annotated[int | None, typer.Option("--iterations", help="Outer iterations M.")]
OuterLr = Annotated[float | None, typer.Option("--outer-lr", help="Outer step size (Adam).")]
InitialModel = Annotated[
    Literal["fixed", "resample"],
    typer.Option("--initial-model", help="The same in every outer iteration, or a fresh one."),
]
Fraction = Annotated[float, typer.Option("--fraction", help="Part of its data that each client gives to the learning.")]

"""Options that several commands share, each declared once, and groups of them that commands take as one argument.

The choices are those of the library, written down again: reading them there would load torch for `--help`.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.core.task import Task
    from fedunfold.unfolding import Learning


def _bundled(incomplete: str) -> list[str]:
    """Names for the shell to complete; files are completed by the shell itself."""
    from importlib import resources

    folder = resources.files("fedunfold") / "config" / "presets"
    names = (file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return sorted(name for name in names if name.startswith(incomplete))


Env = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="A bundled environment (`fedunfold env list`) or a .toml file.",
        autocompletion=_bundled,
    ),
]
Format = Annotated[
    Literal["text", "json"], typer.Option("--format", help="text for people, json for one JSON document on stdout.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Only resume: an error where there is no unfinished run of the same settings.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Trials = Annotated[int, typer.Option("--trials", help="Runs of each method, each with its own randomness.")]
Part = Annotated[str | None, typer.Option(metavar="PART")]
Folder = Annotated[Path | None, typer.Option(metavar="DIR")]
Precision = Literal["float32", "float64"]
AbsentLoss = Literal["evaluate", "skip"]
Schedule = Literal["fast", "paper"]


def task_in_words(task: "Task") -> str:
    """What a summary says of a task."""
    return f"{task.num_groups} classes" if task.num_groups > 1 else f"task {task.name}"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is saved, how it is shown, and on what it computes.

    Attributes:
        context: The command that was typed, as it was parsed.
        out: Folder for the results.
        overwrite: Replace the run that the folder holds already.
        seed: Randomness of training; who holds which data does not change.
        rounds: Rounds T, instead of the environment's.
        holdout: Part of every client's rows that it does not train on but is tested on by itself.
        dtype: Floating-point type of the models.
        track: Follow the run also in tensorboard[:DIR] or mlflow[:FILE or address]; may be given twice.
        threads: Threads for large steps (small ones take one); by default torch's number.
    """

    context: typer.Context
    out: Folder = None
    overwrite: bool = False
    resume: Resume = False
    output: Format = "text"
    seed: Annotated[int | None, typer.Option(min=0)] = None
    rounds: int | None = None
    holdout: Annotated[float | None, typer.Option(metavar="FRACTION")] = None
    device: Device = "cpu"
    dtype: Precision = "float32"
    track: Annotated[list[str] | None, typer.Option(metavar="WHERE")] = None
    threads: Annotated[int | None, typer.Option(min=1)] = None


@dataclass(frozen=True)
class Parts:
    """Parts of a method that replace its own; what is not given stays as the method has it.

    Attributes:
        local: Local optimiser: sgd, prox:mu=0.01, nova, momentum:rho=0.9, adamw, scaffold, feddyn:alpha=0.1.
        server: Server: sgd, momentum, adam:lr=0.01, yogi, adagrad, exp.
        absent: Absent clients: keep the old model, drop out, remember the last update.
        filter: Updates rejected: those not finite, or with norm also those far too large.
    """

    local: Part = None
    server: Part = None
    absent: Literal["keep", "drop", "remember"] | None = None
    filter: Literal["finite", "norm"] | None = None


@dataclass(frozen=True)
class LearningOptions:
    """How weights are learned; what is not given stays as the method has it.

    Attributes:
        adjoint: Gradient: first_order (one run) or exact (about four).
        outer: Weights are learned for: path, sample, balanced (all classes alike), final, final-balanced, mse.
        schedule: Outer iterations and step: fast, or as published for the environment.
        iterations: Outer iterations M.
        lr: Outer step size.
        initial_model: The same in every outer iteration, or a fresh one.
        num_samples: Runs averaged in every outer iteration.
        kl_weight: How strongly weights are held near the clients' sizes.
        step_sizes: Whether the server's step of every round is learned too.
        tie_rounds: Rounds in a row that share their weights.
        optimizer: Outer steps by adam, as in the paper, or rmsprop, for few large ones.
        decay: Whether the outer step size falls to 0 over the iterations.
        update_storage: All rounds' updates in memory, in half of it, or on disk.
    """

    adjoint: Literal["first_order", "exact"] | None = None
    outer: Annotated[str | None, typer.Option(metavar="LOSS")] = None
    schedule: Schedule | None = None
    iterations: int | None = None
    lr: Annotated[float | None, typer.Option("--outer-lr")] = None
    initial_model: Literal["fixed", "resample"] | None = None
    num_samples: int | None = None
    kl_weight: float | None = None
    step_sizes: Literal["fixed", "learned"] | None = None
    tie_rounds: int | None = None
    optimizer: Literal["adam", "rmsprop"] | None = None
    decay: Literal["none", "linear"] | None = None
    update_storage: Literal["full", "half", "disk"] | None = None

    def applied_to(self, learning: "Learning", environment: "Environment") -> "Learning":
        """A method's learning, changed as the command line specifies."""
        from fedunfold.unfolding import FAST, published

        given = {name: value for name, value in asdict(self).items() if value is not None}
        schedule = given.pop("schedule", None)
        if schedule is not None:
            paper = environment.paper_schedule
            given = {**(FAST if schedule == "fast" else published(paper.iterations, paper.lr)), **given}
        return replace(learning, **given)

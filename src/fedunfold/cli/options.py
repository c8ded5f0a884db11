"""Options that several commands share, each declared once, and groups of them that commands take as one argument.

The choices are those of the library, written down again: reading them there would load torch for `--help`.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from fedunfold.config import Environment
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
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds already.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Only resume: an error where there is no unfinished run of the same settings.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads for large steps (small ones take one); by default torch's number."),
]
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
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="WHERE",
        help="Follow the run also in tensorboard[:DIR] or mlflow[:FILE or address]; may be given twice.",
    ),
]
Trials = Annotated[int, typer.Option("--trials", help="Runs of each method, each with its own randomness.")]
Rule = Annotated[
    str | None,
    typer.Option("--rule", metavar="PART", help="Weights: size, uniform, dr:q=1, fedadp:beta=7, fedfa."),
]
Aggregator = Annotated[
    str | None,
    typer.Option(
        "--aggregator",
        metavar="PART",
        help="Updates: mean, median, trimmed-mean:fraction=0.2, krum:num_byzantine=1.",
    ),
]
AbsentLoss = Annotated[
    Literal["evaluate", "skip"],
    typer.Option("--absent-loss", help="Whether absent clients' losses count while weights are learned."),
]
Schedule = Literal["fast", "paper"]
Fraction = Annotated[float, typer.Option("--fraction", help="Part of its data that each client learns weights with.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is saved, how it is shown, and on what it computes.

    Attributes:
        context: The command that was typed, as it was parsed.
    """

    context: typer.Context
    out: Out = None
    overwrite: Overwrite = False
    resume: Resume = False
    output: Format = "text"
    seed: Seed = None
    rounds: Rounds = None
    device: Device = "cpu"
    dtype: Precision = "float32"
    track: Track = None
    threads: Threads = None


@dataclass(frozen=True)
class Parts:
    """Parts of a method that replace its own; what is not given stays as the method has it."""

    local: Annotated[
        str | None,
        typer.Option("--local", metavar="PART", help="Local optimiser: sgd, prox:mu=0.01, nova, momentum:rho=0.9."),
    ] = None
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="PART", help="Server: sgd, momentum, adam:lr=0.01, yogi, adagrad."),
    ] = None
    absent: Annotated[
        Literal["keep", "drop", "remember"] | None,
        typer.Option("--absent", help="Absent clients: keep the old model, drop out, remember the last update."),
    ] = None
    filter: Annotated[
        Literal["finite", "norm"] | None,
        typer.Option("--filter", help="Updates rejected: those not finite, or with norm also those far too large."),
    ] = None


@dataclass(frozen=True)
class LearningOptions:
    """How weights are learned; what is not given stays as the method has it."""

    adjoint: Annotated[
        Literal["first_order", "exact"] | None,
        typer.Option("--adjoint", help="Gradient: first_order (one run) or exact (about four)."),
    ] = None
    outer: Annotated[
        str | None,
        typer.Option(
            "--outer",
            metavar="LOSS",
            help="Weights are learned for: path, sample, balanced (all classes alike), final, final-balanced, mse.",
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        typer.Option("--schedule", help="Outer iterations and step: fast, or as published for the environment."),
    ] = None
    iterations: Annotated[int | None, typer.Option("--iterations", help="Outer iterations M.")] = None
    lr: Annotated[float | None, typer.Option("--outer-lr", help="Outer step size.")] = None
    initial_model: Annotated[
        Literal["fixed", "resample"] | None,
        typer.Option("--initial-model", help="The same in every outer iteration, or a fresh one."),
    ] = None
    num_samples: Annotated[
        int | None, typer.Option("--num-samples", help="Runs averaged in every outer iteration.")
    ] = None
    kl_weight: Annotated[
        float | None, typer.Option("--kl-weight", help="How strongly weights are held near the clients' sizes.")
    ] = None
    step_sizes: Annotated[
        Literal["fixed", "learned"] | None,
        typer.Option("--step-sizes", help="Whether the server's step of every round is learned too."),
    ] = None
    tie_rounds: Annotated[
        int | None, typer.Option("--tie-rounds", help="Rounds in a row that share their weights.")
    ] = None
    optimizer: Annotated[
        Literal["adam", "rmsprop"] | None,
        typer.Option("--optimizer", help="Outer steps by adam, as in the paper, or rmsprop, for few large ones."),
    ] = None
    decay: Annotated[
        Literal["none", "linear"] | None,
        typer.Option("--decay", help="Whether the outer step size falls to 0 over the iterations."),
    ] = None
    update_storage: Annotated[
        Literal["full", "half", "disk"] | None,
        typer.Option("--update-storage", help="All rounds' updates in memory, in half of it, or on disk."),
    ] = None

    def applied_to(self, learning: "Learning", environment: "Environment") -> "Learning":
        """A method's learning, changed as the command line specifies."""
        from fedunfold.unfolding import FAST, published

        given = {name: value for name, value in asdict(self).items() if value is not None}
        schedule = given.pop("schedule", None)
        if schedule is not None:
            paper = environment.paper_schedule
            given = {**(FAST if schedule == "fast" else published(paper.iterations, paper.lr)), **given}
        return replace(learning, **given)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes dataclasses of options an option for each of their fields instead."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{option.name: arguments.pop(option.name) for option in fields(group)})
        command(**arguments)

    parameters: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        parameters += _options(groups[given.name]) if given.name in groups else [given.replace(kind=given.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    """A parameter for each field of a group."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=hints[option.name],
        )
        for option in fields(group)
    ]

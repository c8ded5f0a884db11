"""Options that several commands share, each declared once.

The choices are those of the library, written down again: reading them there would load torch for `--help`.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
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

    folder = resources.files("fedunfold") / "environments" / "bundled"
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
    bool, typer.Option("--resume", help="Go on with an unfinished run, or say that there is none; never begin anew.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads for large steps, small ones take one; as many as torch has."),
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
UpdateFilter = Annotated[
    Literal["finite", "norm"] | None,
    typer.Option("--screen", help="Updates set aside: those not finite, or with norm also those far too long."),
]
Aggregate = Annotated[
    str | None,
    typer.Option("--aggregate", metavar="PART", help="Updates: mean, median, trimmed:share=0.2, krum:bad=1."),
]
AbsentLoss = Annotated[
    Literal["evaluate", "skip"],
    typer.Option("--absent-loss", help="Whether absent clients' losses count in the learning."),
]
Schedule = Literal["fast", "paper"]
Fraction = Annotated[float, typer.Option("--fraction", help="Part of its data that each client gives to the learning.")]


@dataclass(frozen=True)
class LearningOptions:
    """How weights are learned; what is not said is left as the method has it."""

    adjoint: Annotated[
        Literal["first_order", "exact"] | None,
        typer.Option("--adjoint", help="Gradient: first_order (one run) or exact (about four)."),
    ] = None
    outer: Annotated[
        Literal["path", "sample", "balanced", "final", "final-balanced", "mse"] | None,
        typer.Option("--outer", help="What weights are learned for; balanced counts all classes alike."),
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
    draws: Annotated[int | None, typer.Option("--draws", help="Runs averaged in every outer iteration.")] = None
    pull: Annotated[
        float | None, typer.Option("--pull", help="How strongly weights are held near the clients' sizes.")
    ] = None
    step_sizes: Annotated[
        Literal["one", "learned"] | None,
        typer.Option("--step-sizes", help="Whether the server's step of every round is learned too."),
    ] = None
    shared_rounds: Annotated[
        int | None, typer.Option("--shared-rounds", help="Rounds in a row that share their weights.")
    ] = None
    optimizer: Annotated[
        Literal["adam", "rmsprop"] | None,
        typer.Option("--optimizer", help="Outer steps by adam, as in the paper, or rmsprop, for few large ones."),
    ] = None
    decay: Annotated[
        Literal["none", "linear"] | None,
        typer.Option("--decay", help="Whether the outer step size goes down to 0 over the iterations."),
    ] = None
    tape: Annotated[
        Literal["full", "half", "disk"] | None,
        typer.Option("--tape", help="All rounds' updates in memory, in half of it, or on disk."),
    ] = None

    def changing(self, learning: "Learning", environment: "Environment") -> "Learning":
        """A method's learning, changed as the command line says."""
        from fedunfold.unfolding import FAST, published

        said = {name: value for name, value in asdict(self).items() if value is not None}
        schedule = said.pop("schedule", None)
        if schedule is not None:
            paper = environment.paper_schedule
            said = {**(FAST if schedule == "fast" else published(paper.iterations, paper.lr)), **said}
        return replace(learning, **said)


def with_learning(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `learning: LearningOptions` an option for each of its fields instead."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        said = {name: arguments.pop(name) for name in names}
        command(**arguments, learning=LearningOptions(**said))

    hints = get_type_hints(LearningOptions, include_extras=True)
    names = [option.name for option in fields(LearningOptions)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(kind=keyword) for p in inspect.signature(command).parameters.values() if p.name != "learning"]
    added = [inspect.Parameter(name, keyword, default=None, annotation=hints[name]) for name in names]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return run

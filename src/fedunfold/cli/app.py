"""The commands. What they need is imported when they run, so that `--help` answers at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedunfold.cli import Stopped
from fedunfold.cli import options as opt
from fedunfold.cli.bench import bench
from fedunfold.cli.data import app as data
from fedunfold.cli.environments import app as environments
from fedunfold.cli.reproduce import reproduce
from fedunfold.cli.theory import theory
from fedunfold.errors import FedunfoldError, InputError
from fedunfold.version import VERSION

if TYPE_CHECKING:
    from fedunfold.environments import Environment
    from fedunfold.experiments.methods import Method
    from fedunfold.report.run_folder import RunFolder

DEMO = Path("runs/demo")  # the demo's own folder, which it replaces without being asked


class Commands(TyperGroup):
    """Leaves Ctrl-C to `main`; typer would exit without a word."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Learn how much each client should count in each round of federated learning.",
)
app.add_typer(environments, name="env")
app.add_typer(data, name="data")
app.command(epilog="Example: fedunfold reproduce mnist --out runs/mnist --device cuda")(reproduce)
app.command(epilog="Example: fedunfold theory runs/demo")(theory)
app.command(epilog="Example: fedunfold bench --repeats 5 --page docs/benchmarks.md")(bench)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedunfold {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: fedunfold demo")
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the results.")] = DEMO,
    overwrite: opt.Overwrite = False,
    format: opt.Format = "text",
    seed: opt.Seed = None,
    device: opt.Device = "cpu",
) -> None:
    """Learn weights on the embedded digits, compare them with FedAvg, and show table and figures."""
    from fedunfold.report.run_folder import RunFolder

    _compare(
        "demo",
        _environment("digits-label-skew", seed, None),
        ["fedavg", "dr-fedavg", "duw-fedavg"],
        RunFolder(out, overwrite=overwrite or out == DEMO),
        trials=5,
        format=format,
        device=device,
        show_weights=True,
    )


@app.command(epilog="Example: fedunfold learn digits-label-skew --out runs/digits --adjoint exact")
@opt.with_learning
def learn(
    env: opt.Env,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    format: opt.Format = "text",
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    method: Annotated[
        str, typer.Option("--method", help="What the weights are for: duw-fedavg, duw-fednova, fedunfold, …")
    ] = "duw-fedavg",
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.Absent = None,
    absent_loss: opt.AbsentLoss = "evaluate",
    fraction: opt.Fraction = 1.0,
    device: opt.Device = "cpu",
    dtype: opt.Precision = "float32",
    *,
    learning: opt.LearningOptions,
) -> None:
    """Learn aggregation weights for an environment, and save them."""
    from dataclasses import replace

    import torch

    from fedunfold.cli import console
    from fedunfold.experiments import methods
    from fedunfold.experiments.learning import learn_weights
    from fedunfold.report.run_folder import of_learning

    environment = _environment(env, seed, rounds)
    chosen = methods.changed(methods.method(method), update=update, server=server, absent=absent)
    how = learning.changing(chosen.learning, environment)
    algorithm = replace(chosen.algorithm, absent_loss=absent_loss)
    folder = _folder("learn", environment, out, overwrite)
    interrupted = False
    with folder, console.ProgressWatcher() as watcher:
        try:
            learned = learn_weights(
                environment,
                algorithm=algorithm,
                learning=how,
                fraction=fraction,
                device=device,
                dtype=getattr(torch, dtype),
                on_iteration=lambda so_far: watcher.learning("learn", so_far, how.iterations),
            )
        except KeyboardInterrupt:
            if "learn" not in watcher.learned:
                raise Stopped("stopped before the first outer iteration; nothing was saved.") from None
            learned, interrupted = watcher.learned["learn"], True
    algorithm = methods.learned_method(learned).algorithm  # with the step sizes, where they were learned
    folder.write(*("learn", environment, of_learning(learned)), algorithm=algorithm, learning=how, fraction=fraction)
    file, done = folder.path / "weights.safetensors", len(learned.losses)
    if format == "json":
        console.print_json(
            {
                "environment": environment.name,
                "clients": learned.keys,
                "iterations": done,
                "outer_loss": learned.losses.tolist(),
                "weights": learned.weights.tolist(),
                "step_sizes": algorithm.step_sizes,
                "folder": str(folder.path),
                "file": str(file),
            }
        )
    else:
        console.out.print(console.weights_table(learned, algorithm.step_sizes))
        console.say(f"outer loss {learned.losses[0]:.5g} → {learned.losses[-1]:.5g} in {done} iterations; in {file}")
    if interrupted:
        raise Stopped(f"stopped after {done} of {how.iterations} outer iterations; what was learned is saved.")


@app.command(epilog="Example: fedunfold run digits-label-skew --rule dr:q=1 --absent drop")
def run(
    env: opt.Env,
    method: Annotated[
        str | None, typer.Option("--method", help="A method's name, such as fednova; fedavg where nothing is said.")
    ] = None,
    rule: opt.Rule = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Learned weights (.safetensors).")
    ] = None,
    mapped: Annotated[
        bool, typer.Option("--map", help="Map weights by client key and round to this federation.")
    ] = False,
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.Absent = None,
    trial: Annotated[int, typer.Option("--trial", min=0, help="Which trial's randomness to draw.")] = 0,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    format: opt.Format = "text",
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    device: opt.Device = "cpu",
    dtype: opt.Precision = "float32",
) -> None:
    """Train the federation once with a rule, a method or learned weights."""
    from contextlib import nullcontext

    import torch

    from fedunfold.cli import console
    from fedunfold.experiments import comparing, methods
    from fedunfold.report.run_folder import RunFolder, of_run

    if mapped and weights is None:
        raise InputError("--map is about learned weights; name their file with --weights.")
    for option, given in (("--rule", rule), ("--method", method)):
        if weights is not None and given is not None:
            raise InputError(f"give {option} or --weights, not both.")
    environment = _environment(env, seed, rounds)
    chosen = methods.method(method or "fedavg") if weights is None else _from_file(weights, environment, mapped)
    chosen = methods.changed(chosen, update=update, rule=rule, server=server, absent=absent)
    folder = None if out is None else RunFolder(out, overwrite=overwrite)
    with folder or nullcontext(), console.progress() as bars:
        task = bars.add_task(chosen.name, total=environment.rounds, note="")
        result = comparing.run(
            environment,
            chosen,
            trial=trial,
            device=device,
            dtype=getattr(torch, dtype),
            on_round=lambda _, seen: bars.update(task, advance=1, note=f"{100 * seen.accuracy:.1f} %"),
        )
    if folder is not None:
        files = of_run(environment, chosen.name, result)
        folder.write("run", environment, files, method=chosen.name, algorithm=chosen.algorithm, trial=trial)
    if format == "json":
        console.print_json(
            {
                "environment": environment.name,
                "method": chosen.name,
                "accuracy": 100 * result.accuracies[-1],
                "rounds": [100 * accuracy for accuracy in result.accuracies],
                "losses": [evaluation.loss for evaluation in result.evaluations],
                "weights": result.weights.tolist(),
            }
        )
        return
    for t, evaluation in enumerate(result.evaluations):
        console.out.print(f"round {t + 1:3d}  accuracy {100 * evaluation.accuracy:5.1f} %  loss {evaluation.loss:.4f}")
    if folder is not None:
        console.say(f"records and the trained model are in {folder.path}")


@app.command(epilog="Example: fedunfold compare digits-flaky --methods fedavg,fednova,fedunfold --trials 5")
@opt.with_learning
def compare(
    env: opt.Env,
    methods: Annotated[
        str,
        typer.Option("--methods", help="Names, and files of learned weights, separated by commas."),
    ] = "fedavg,duw-fedavg",
    trials: opt.Trials = 5,
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.Absent = None,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    format: opt.Format = "text",
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    device: opt.Device = "cpu",
    dtype: opt.Precision = "float32",
    *,
    learning: opt.LearningOptions,
) -> None:
    """Compare methods over several trials; those with learned weights (duw-…) learn them first."""
    environment = _environment(env, seed, rounds)
    _compare(
        "compare",
        environment,
        [name.strip() for name in methods.split(",") if name.strip()],
        _folder("compare", environment, out, overwrite),
        trials=trials,
        format=format,
        device=device,
        dtype=dtype,
        parts={"update": update, "server": server, "absent": absent},
        learning=learning,
    )


def _compare(
    command: str,
    environment: "Environment",
    names: Sequence[str],
    folder: "RunFolder",
    *,
    trials: int,
    format: opt.Format,
    device: str,
    dtype: opt.Precision = "float32",
    parts: dict[str, str | None] | None = None,
    learning: opt.LearningOptions | None = None,
    show_weights: bool = False,
) -> None:
    import torch

    from fedunfold.cli import console
    from fedunfold.experiments import comparing
    from fedunfold.report.run_folder import of_comparison

    ending: Stopped | FedunfoldError | None = None
    with folder, console.ProgressWatcher() as watcher:
        try:
            chosen = [_chosen(name, environment, parts or {}, learning) for name in names]
            comparison = comparing.compare(
                environment,
                chosen,
                trials=trials,
                device=device,
                dtype=getattr(torch, dtype),
                watcher=watcher,
            )
        except KeyboardInterrupt:
            comparison = watcher.so_far(environment.name)
            if comparison.methods:
                ending = Stopped(f"stopped; what was finished is shown and kept in {folder.path}.")
            elif watcher.learned:
                ending = Stopped(f"stopped before the first trial ended; weights so far are kept in {folder.path}.")
            else:
                raise Stopped("stopped before the first trial ended; nothing was saved.") from None
        except FedunfoldError as error:
            # A method that failed in a later trial is left out: its mean would be over the lucky ones.
            comparison, ending = watcher.so_far(environment.name, at_least=trials), error
            if not comparison.methods:
                raise
    # Shown before it is written: a disk that is full by now must not take the table along.
    if comparison.methods and format == "json":
        console.print_json(comparison.as_json())
    elif comparison.methods:
        console.out.print(console.comparison_table(comparison))
        for result in comparison.methods if show_weights else ():
            if result.learned is not None:
                console.out.print(console.weights_table(result.learned))
    unfinished = {} if isinstance(ending, FedunfoldError) else watcher.learned
    files = of_comparison(comparison, unfinished)
    folder.write(command, environment, files, methods=names, trials=trials, learning=learning, parts=parts)
    if format == "text":
        console.say(f"records and figures are in {folder.path}")
    if ending is not None:
        raise ending


def _folder(command: str, environment: "Environment", out: Path | None, overwrite: bool) -> "RunFolder":
    """Where a run is kept: the folder asked for, or one of runs/ that is not taken."""
    from fedunfold.report.run_folder import RunFolder

    name = f"{command}-{environment.name}"
    if out is None and not overwrite:
        return RunFolder.unused(name)
    return RunFolder(out or RunFolder.named(name), overwrite=overwrite)


def _environment(name: str, seed: int | None, rounds: int | None) -> "Environment":
    from fedunfold.environments import environment

    changes = {field: value for field, value in (("seed", seed), ("rounds", rounds)) if value is not None}
    found = environment(name)
    return found.with_(**changes) if changes else found


def _chosen(
    name: str, environment: "Environment", parts: dict[str, str | None], learning: opt.LearningOptions | None
) -> "Method":
    """A method by its name or by the file of its weights, with the parts and the learning asked for."""
    from dataclasses import replace

    from fedunfold.experiments.methods import changed, method

    named = _from_file(Path(name), environment, False) if name.endswith(".safetensors") else method(name)
    named = changed(named, **parts)
    return named if learning is None else replace(named, learning=learning.changing(named.learning, environment))


def _from_file(path: Path, environment: "Environment", mapped: bool) -> "Method":
    """Learned weights as a method, checked against the environment before anything runs."""
    from fedunfold.experiments.methods import learned_method
    from fedunfold.weighting.learned import LearnedWeights

    data = environment.load()
    learned = LearnedWeights.load(path)
    fitting = learned.applied_to(data.keys, environment.rounds, environment.digest(data), mapped=mapped)
    folder = path.resolve().parent.name  # says more than the name that `learn` gives to every file
    return learned_method(fitting, folder if folder and path.stem == "weights" else path.stem)

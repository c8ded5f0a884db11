"""The commands. What they need is imported when they run, so that `--help` answers at once."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedunfold.cli import options as opt
from fedunfold.cli.data import app as data
from fedunfold.cli.environments import app as environments
from fedunfold.cli.reproduce import reproduce
from fedunfold.cli.theory import theory
from fedunfold.errors import FedunfoldError
from fedunfold.version import VERSION

if TYPE_CHECKING:
    from fedunfold.environments import Environment
    from fedunfold.experiments.methods import Method
    from fedunfold.unfolding import Learning

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Learn how much each client should count in each round of federated learning.",
)
app.add_typer(environments, name="env")
app.add_typer(data, name="data")
app.command(epilog="Example: fedunfold reproduce mnist --out runs/mnist --device cuda")(reproduce)
app.command(epilog="Example: fedunfold theory runs/demo")(theory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what the user can mend is told in one line, with exit code 2."""
    try:
        app(args=arguments)
    except FedunfoldError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


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
    out: opt.Out = None,
    format: opt.FormatOption = opt.Format.text,
    seed: opt.Seed = None,
    device: opt.Device = "cpu",
) -> None:
    """Learn weights on the embedded digits, compare them with FedAvg, and show table and figures."""
    _compare(
        _environment("digits-label-skew", seed, None),
        ["fedavg", "dr-fedavg", "duw-fedavg"],
        trials=5,
        out=out,
        format=format,
        device=device,
        show_weights=True,
    )


@app.command(epilog="Example: fedunfold learn digits-label-skew --out runs/digits --adjoint exact")
def learn(
    env: opt.Env,
    out: opt.Out = None,
    format: opt.FormatOption = opt.Format.text,
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.AbsentOption = None,
    adjoint: opt.AdjointOption = opt.Adjoint.first_order,
    outer: opt.OuterOption = opt.Outer.path,
    absent_loss: opt.AbsentLossOption = opt.AbsentLoss.evaluate,
    schedule: opt.ScheduleOption = opt.Schedule.fast,
    iterations: opt.Iterations = None,
    outer_lr: opt.OuterLr = None,
    initial_model: opt.InitialModelOption = opt.InitialModel.fixed,
    fraction: opt.Fraction = 1.0,
    device: opt.Device = "cpu",
    dtype: opt.PrecisionOption = opt.Precision.float32,
) -> None:
    """Learn aggregation weights for an environment, and save them."""
    from dataclasses import replace

    import torch

    from fedunfold.cli import console
    from fedunfold.experiments.learning import learn_weights
    from fedunfold.experiments.methods import changed, method
    from fedunfold.report.run_folder import RunFolder

    environment = _environment(env, seed, rounds)
    learning = _learning(schedule, iterations, outer_lr, adjoint, outer, initial_model)
    algorithm = changed(method("fedavg"), update=update, server=server, absent=absent).algorithm
    algorithm = replace(algorithm, absent_loss=absent_loss.value)
    folder = RunFolder(out or Path("runs") / f"learn-{environment.name}")
    folder.settings("learn", environment, algorithm=algorithm, learning=learning, fraction=fraction)
    interrupted = False
    with console.ProgressWatcher() as watcher:
        try:
            learned = learn_weights(
                environment,
                algorithm=algorithm,
                learning=learning,
                fraction=fraction,
                device=device,
                dtype=getattr(torch, dtype.value),
                on_iteration=lambda so_far: watcher.learning("learn", so_far, learning.iterations),
            )
        except KeyboardInterrupt:
            if "learn" not in watcher.learned:
                _stop("stopped before the first outer iteration; nothing was saved.")
            learned, interrupted = watcher.learned["learn"], True
    file = folder.learned(learned)
    done = len(learned.losses)
    if format is opt.Format.json:
        console.print_json(
            {
                "environment": environment.name,
                "clients": learned.keys,
                "iterations": done,
                "outer_loss": learned.losses.tolist(),
                "weights": learned.weights.tolist(),
                "file": str(file),
            }
        )
    else:
        console.out.print(console.weights_table(learned))
        console.out.print(
            f"outer loss {learned.losses[0]:.5g} → {learned.losses[-1]:.5g} in {done} iterations; in {file}",
            soft_wrap=True,
        )
    if interrupted:
        _stop(f"stopped after {done} of {learning.iterations} outer iterations; what was learned is saved.")


@app.command(epilog="Example: fedunfold run digits-label-skew --rule dr:q=1 --absent drop")
def run(
    env: opt.Env,
    method: Annotated[str, typer.Option("--method", help="A method's name, such as fednova.")] = "fedavg",
    rule: opt.Rule = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Learned weights (.safetensors).")
    ] = None,
    mapped: Annotated[
        bool, typer.Option("--map", help="Map weights by client key and round to this federation.")
    ] = False,
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.AbsentOption = None,
    trial: Annotated[int, typer.Option("--trial", min=0, help="Which trial's randomness to draw.")] = 0,
    out: opt.Out = None,
    format: opt.FormatOption = opt.Format.text,
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    device: opt.Device = "cpu",
    dtype: opt.PrecisionOption = opt.Precision.float32,
) -> None:
    """Train the federation once with a rule, a method or learned weights."""
    import torch

    from fedunfold.cli import console
    from fedunfold.errors import InputError
    from fedunfold.experiments import comparing, methods
    from fedunfold.report.run_folder import RunFolder

    environment = _environment(env, seed, rounds)
    if weights is not None and rule is not None:
        raise InputError("give --rule or --weights, not both.")
    chosen = methods.method(method) if weights is None else _from_file(weights, environment, mapped)
    chosen = methods.changed(chosen, update=update, rule=rule, server=server, absent=absent)
    folder = None if out is None else RunFolder(out)
    with console.progress() as bars:
        task = bars.add_task(chosen.name, total=environment.rounds, note="")
        result = comparing.run(
            environment,
            chosen,
            trial=trial,
            device=device,
            dtype=getattr(torch, dtype.value),
            on_round=lambda _, seen: bars.update(task, advance=1, note=f"{100 * seen.accuracy:.1f} %"),
        )
    if folder is not None:
        folder.settings("run", environment, method=chosen.name, algorithm=chosen.algorithm, trial=trial)
        folder.run(chosen.name, result)
    if format is opt.Format.json:
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


@app.command(epilog="Example: fedunfold compare digits-flaky --methods fedavg,fednova,duw-fedavg --trials 5")
def compare(
    env: opt.Env,
    methods: Annotated[
        str,
        typer.Option("--methods", help="Names, and files of learned weights, separated by commas."),
    ] = "fedavg,duw-fedavg",
    trials: opt.Trials = 5,
    update: opt.Update = None,
    server: opt.Server = None,
    absent: opt.AbsentOption = None,
    adjoint: opt.AdjointOption = opt.Adjoint.first_order,
    outer: opt.OuterOption = opt.Outer.path,
    schedule: opt.ScheduleOption = opt.Schedule.fast,
    iterations: opt.Iterations = None,
    outer_lr: opt.OuterLr = None,
    initial_model: opt.InitialModelOption = opt.InitialModel.fixed,
    out: opt.Out = None,
    format: opt.FormatOption = opt.Format.text,
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    device: opt.Device = "cpu",
    dtype: opt.PrecisionOption = opt.Precision.float32,
) -> None:
    """Compare methods over several trials; those with learned weights (duw-…) learn them first."""
    _compare(
        _environment(env, seed, rounds),
        [name.strip() for name in methods.split(",") if name.strip()],
        trials=trials,
        out=out,
        format=format,
        device=device,
        dtype=dtype,
        parts={"update": update, "server": server, "absent": absent},
        learning=_learning(schedule, iterations, outer_lr, adjoint, outer, initial_model),
    )


def _compare(
    environment: "Environment",
    names: Sequence[str],
    *,
    trials: int,
    out: Path | None,
    format: opt.Format,
    device: str,
    dtype: opt.Precision = opt.Precision.float32,
    parts: dict[str, str | None] | None = None,
    learning: "Learning | None" = None,
    show_weights: bool = False,
) -> None:
    import torch

    from fedunfold.cli import console
    from fedunfold.experiments import comparing
    from fedunfold.experiments.methods import changed, method
    from fedunfold.report.run_folder import RunFolder

    chosen = [
        changed(
            _from_file(Path(name), environment, False) if name.endswith(".safetensors") else method(name),
            **(parts or {}),
        )
        for name in names
    ]
    folder = None if out is None else RunFolder(out)
    interrupted = False
    with console.ProgressWatcher() as watcher:
        try:
            comparison = comparing.compare(
                environment,
                chosen,
                trials=trials,
                learning=learning,
                device=device,
                dtype=getattr(torch, dtype.value),
                watcher=watcher,
            )
        except KeyboardInterrupt:
            comparison, interrupted = watcher.so_far(environment.name), True
    if folder is not None:
        folder.settings("compare", environment, methods=names, trials=trials, learning=learning, parts=parts)
        folder.comparison(comparison)
        for name, learned in watcher.learned.items() if interrupted else ():
            folder.weights(name, learned)
    if format is opt.Format.json:
        console.print_json(comparison.as_json())
    else:
        console.out.print(console.comparison_table(comparison))
        for result in comparison.methods if show_weights else ():
            if result.learned is not None:
                console.out.print(console.weights_table(result.learned))
        if folder is not None:
            console.out.print(f"records and figures are in {folder.path}", soft_wrap=True)
    if interrupted:
        _stop("stopped; what was finished is shown" + (f" and kept in {folder.path}." if folder else "."))


def _environment(name: str, seed: int | None, rounds: int | None) -> "Environment":
    from fedunfold.environments import environment

    changes = {field: value for field, value in (("seed", seed), ("rounds", rounds)) if value is not None}
    found = environment(name)
    return found.with_(**changes) if changes else found


def _learning(
    schedule: opt.Schedule,
    iterations: int | None,
    lr: float | None,
    adjoint: opt.Adjoint,
    outer: opt.Outer,
    initial_model: opt.InitialModel,
) -> "Learning":
    from fedunfold.unfolding import SCHEDULES, Learning

    scheduled_iterations, scheduled_lr = SCHEDULES[schedule.value]
    return Learning(
        iterations=scheduled_iterations if iterations is None else iterations,
        lr=scheduled_lr if lr is None else lr,
        adjoint=adjoint.value,
        outer=outer.value,
        initial_model=initial_model.value,
    )


def _from_file(path: Path, environment: "Environment", mapped: bool) -> "Method":
    """Learned weights as a method, checked against the environment before anything runs."""
    from fedunfold.experiments.methods import learned_method
    from fedunfold.weighting.learned import LearnedWeights

    data = environment.load()
    learned = LearnedWeights.load(path)
    fitting = learned.applied_to(data.keys, environment.rounds, environment.digest(data), mapped=mapped)
    return learned_method(fitting, path.stem)


def _stop(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    raise typer.Exit(INTERRUPTED)

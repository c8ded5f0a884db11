"""`fedunfold run`: one training of the federation."""

from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import Stopped
from fedunfold.cli import options as opt
from fedunfold.cli.context import computing, environment_of, folder_for, method_from_file
from fedunfold.core.errors import InputError


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
    screen: opt.UpdateFilter = None,
    aggregate: opt.Aggregate = None,
    trial: Annotated[int, typer.Option("--trial", min=0, help="Which trial's randomness to draw.")] = 0,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    resume: opt.Resume = False,
    format: opt.Format = "text",
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    device: opt.Device = "cpu",
    dtype: opt.Precision = "float32",
    track: opt.Track = None,
    threads: opt.Threads = None,
) -> None:
    """Train the federation once with a rule, a method or learned weights."""
    from contextlib import nullcontext
    from dataclasses import asdict

    import torch

    from fedunfold.cli import console, trackers
    from fedunfold.runs.artifacts import of_run
    from fedunfold.training import compare, methods

    if mapped and weights is None:
        raise InputError("--map is about learned weights; name their file with --weights.")
    for option, given in (("--rule", rule), ("--method", method)):
        if weights is not None and given is not None:
            raise InputError(f"give {option} or --weights, not both.")
    environment = environment_of(env, seed, rounds)
    chosen = methods.method(method or "fedavg") if weights is None else method_from_file(weights, environment, mapped)
    parts = {"update": update, "rule": rule, "server": server, "absent": absent, "screen": screen}
    chosen = methods.changed(chosen, **parts, aggregate=aggregate)
    if resume and out is None:
        raise InputError("a run is kept only with --out; --resume needs it too.")
    folder = None if out is None else folder_for("run", environment, out, overwrite, resume)
    with folder or nullcontext():
        with computing(folder.threads if folder else threads), console.ProgressTracker() as progress:
            tracker = trackers.trackers(progress, environment, folder, track)
            try:
                result = compare.run(
                    environment,
                    chosen,
                    trial=trial,
                    device=device,
                    dtype=getattr(torch, dtype),
                    checkpoint=None if folder is None else folder.checkpoints / "run.safetensors",
                    callback=tracker,
                )
            except KeyboardInterrupt:
                if folder is None or not progress.rounds_made:
                    raise
                so_far = f"{progress.rounds_made} of {environment.rounds} rounds"
                raise Stopped(f"stopped after {so_far}; the same command goes on from them.") from None
        if folder is not None:
            files = of_run(environment, chosen.name, result)
            folder.write(environment, files, method=chosen.name, algorithm=chosen.algorithm, trial=trial)
            trackers.tell_kept(tracker, folder)
    if format == "json":
        console.print_json(
            {
                "environment": environment.name,
                "method": chosen.name,
                "accuracy": 100 * result.accuracies[-1],
                "rounds": [100 * accuracy for accuracy in result.accuracies],
                "losses": [evaluation.loss for evaluation in result.evaluations],
                "weights": result.weights.tolist(),
                "rejected": [asdict(entry) for entry in result.rejected],
                "warnings": result.warnings,
            }
        )
        return
    for t, evaluation in enumerate(result.evaluations):
        console.out.print(f"round {t + 1:3d}  accuracy {100 * evaluation.accuracy:5.1f} %  loss {evaluation.loss:.4f}")
    console.note(result.warnings)
    if folder is not None:
        console.say(f"records and the trained model are in {folder.path}")

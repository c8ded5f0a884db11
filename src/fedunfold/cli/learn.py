"""`fedunfold learn`: aggregation weights for an environment."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedunfold.cli import Stopped
from fedunfold.cli import options as opt
from fedunfold.cli.context import environment_of, folder_for, followed

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.rules.learned import LearnedWeights


@opt.with_groups
def learn(
    env: opt.Env,
    method: Annotated[
        str, typer.Option("--method", help="What the weights are for: duw-fedavg, duw-fednova, fedunfold, …")
    ] = "duw-fedavg",
    absent_loss: opt.AbsentLoss = "evaluate",
    fraction: opt.Fraction = 1.0,
    *,
    parts: opt.Parts,
    options: opt.RunOptions,
    learning: opt.LearningOptions,
) -> None:
    """Learn aggregation weights for an environment, and save them."""
    import torch

    from fedunfold.api import learn_weights
    from fedunfold.cli import console, trackers
    from fedunfold.runs.artifacts import of_learning
    from fedunfold.training import methods

    environment = environment_of(env, options)
    chosen = methods.changed(methods.method(method), **asdict(parts))
    how = learning.applied_to(chosen.learning, environment)
    algorithm = replace(chosen.algorithm, absent_loss=absent_loss)
    interrupted = False
    with folder_for(options, environment) as folder:
        with followed(options, environment, folder) as (progress, tracker):
            try:
                learned = learn_weights(
                    environment,
                    algorithm=algorithm,
                    learning=how,
                    fraction=fraction,
                    device=options.device,
                    dtype=getattr(torch, options.dtype),
                    checkpoint=folder.checkpoints / "learning.safetensors",
                    callback=tracker,
                )
            except KeyboardInterrupt:
                if not progress.learned:
                    raise Stopped("stopped before the first outer iteration; nothing was saved.") from None
                (learned,), interrupted = progress.learned.values(), True
        algorithm = methods.learned_method(learned).algorithm  # with the step sizes, where they were learned
        files = of_learning(learned)
        folder.write(environment, files, algorithm=algorithm, learning=how, fraction=fraction)
        trackers.report_files(tracker, folder)
        _show(learned, environment, algorithm.step_sizes, folder.path, options.output)
        if interrupted:
            done = f"{len(learned.losses)} of {how.iterations} outer iterations"
            raise Stopped(f"stopped after {done}; what was learned is saved, and the same command resumes.")
        if options.output == "text" and "," not in str(folder.path):  # which separates methods
            same = {"--seed": options.seed, "--rounds": options.rounds}  # of the environment they were learned for
            more = [str(word) for pair in same.items() if pair[1] is not None for word in pair]
            both = f"fedavg,{folder.path / 'weights.safetensors'}"
            command = shlex.join(["fedunfold", "compare", env, "--methods", both, *more])
            console.say(f"to see what they bring: {command}")


def _show(
    learned: "LearnedWeights", environment: "Environment", step_sizes: Sequence[float], folder: Path, output: opt.Format
) -> None:
    from fedunfold.cli import console

    file, done = folder / "weights.safetensors", len(learned.losses)
    if output == "json":
        console.print_json(
            {
                "environment": environment.name,
                "clients": learned.client_ids,
                "iterations": done,
                "outer_loss": learned.losses.tolist(),
                "weights": learned.weights.tolist(),
                "step_sizes": list(step_sizes),
                "warnings": learned.warnings,
                "folder": str(folder),
                "file": str(file),
            }
        )
    else:
        console.out.print(console.weights_table(learned, step_sizes))
        console.note(learned.warnings)
        console.say(f"outer loss {learned.losses[0]:.5g} → {learned.losses[-1]:.5g} in {done} iterations; in {file}")

"""`fedunfold learn`: aggregation weights for an environment."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.rules.learned import LearnedWeights


def learn(
    env: opt.Env,
    method: str = "duw-fedavg",
    absent_loss: opt.AbsentLoss = "evaluate",
    fraction: float = 1.0,
    *,
    parts: opt.Parts,
    options: opt.RunOptions,
    learning: opt.LearningOptions,
) -> None:
    """Learn aggregation weights for an environment, and save them.

    Args:
        method: What the weights are for: duw-fedavg, duw-fednova, fedunfold-table, …
        absent_loss: Whether absent clients' losses count while weights are learned.
        fraction: Part of its data that each client learns weights with.
    """
    from fedunfold.api import learn_weights
    from fedunfold.cli.context import environment_of, folder_for, followed, precision_of
    from fedunfold.rules.parametric import ParametricRule
    from fedunfold.runs.artifacts import of_learning
    from fedunfold.training import methods

    environment = environment_of(env, options)
    chosen = methods.changed(methods.method(method), **asdict(parts))
    if isinstance(chosen.rule, ParametricRule):
        raise InputError(
            f"method {method} needs no learning: run it; fedunfold-table learns weights for an environment."
        )
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
                    checkpoint=folder.checkpoints / "learning.safetensors",
                    callback=tracker,
                    **precision_of(options),
                )
            except KeyboardInterrupt:
                if not progress.learned:
                    raise Stopped("stopped before the first outer iteration; nothing was saved.") from None
                (learned,), interrupted = progress.learned.values(), True
        algorithm = methods.learned_method(learned).algorithm  # with the step sizes, where they were learned
        files = of_learning(learned)
        written = folder.write(environment, files, algorithm=algorithm, learning=how, fraction=fraction)
        tracker.on_artifacts(written)
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

"""`fedunfold run`: one training of the federation."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError


def run(
    env: opt.Env,
    method: str | None = None,
    rule: opt.Part = None,
    weights: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    mapped: Annotated[bool, typer.Option("--map")] = False,
    aggregator: opt.Part = None,
    trial: Annotated[int, typer.Option(min=0)] = 0,
    *,
    parts: opt.Parts,
    options: opt.RunOptions,
) -> None:
    """Train the federation once with a rule, a method or learned weights.

    Args:
        method: A method's name, such as fednova; by default fedavg.
        rule: Weights: size, uniform, dr:q=1, fedadp:beta=7, fedfa, feddisco, q-fedavg:q=0.1, afl, fedawa and others.
        weights: Learned weights, or a pre-trained rule (.safetensors).
        mapped: Map weights by client key and round to this federation.
        aggregator: Updates: mean, median, trimmed-mean:fraction=0.2, krum:num_byzantine=1.
        trial: Which trial's randomness to draw.
    """
    from fedunfold import api
    from fedunfold.cli.context import (
        described_rules,
        environment_of,
        folder_for,
        followed,
        method_from_file,
        precision_of,
    )
    from fedunfold.core.task import finite
    from fedunfold.runs.artifacts import of_run
    from fedunfold.training import methods

    if mapped and weights is None:
        raise InputError("--map is about learned weights; name their file with --weights.")
    for option, given in (("--rule", rule), ("--method", method)):
        if weights is not None and given is not None:
            raise InputError(f"give {option} or --weights, not both.")
    if options.resume and options.out is None:
        raise InputError("a run is saved only with --out; --resume needs it too.")
    environment = environment_of(env, options)
    chosen = methods.method(method or "fedavg") if weights is None else method_from_file(weights, environment, mapped)
    chosen = methods.changed(chosen, rule=rule, aggregator=aggregator, **asdict(parts))
    folder = None if options.out is None else folder_for(options, environment)
    with folder or nullcontext():
        with followed(options, environment, folder) as (progress, tracker):
            try:
                file = None if folder is None else folder.checkpoints / "run.safetensors"
                on = precision_of(options)
                result = api.run(environment, chosen, trial=trial, checkpoint=file, callback=tracker, **on)
            except KeyboardInterrupt:
                if folder is None or not progress.rounds_made:
                    raise
                so_far = f"{progress.rounds_made} of {environment.rounds} rounds"
                raise Stopped(f"stopped after {so_far}; the same command resumes from them.") from None
        if folder is not None:
            files = of_run(environment, chosen, result)
            described = {"method": chosen.name, "rules": described_rules([chosen])}
            written = folder.write(environment, files, **described, algorithm=chosen.algorithm, trial=trial)
            tracker.on_artifacts(written)
    last = result.evaluations[-1]
    primary, factor = last.primary, last.primary.factor()
    if options.output == "json":
        console.print_json(
            {
                "environment": environment.name,
                "method": chosen.name,
                primary.name: finite(factor * result.scores[-1]),
                "metric": primary.describe(),
                "metrics": primary.shown(last.score, last.metrics),
                "rounds": [finite(factor * score) for score in result.scores],
                "losses": [evaluation.loss for evaluation in result.evaluations],
                "weights": result.weights.tolist(),
                **({"times": result.times} if result.times else {}),
                **({"staleness": result.staleness} if result.staleness else {}),
                "rejected": [asdict(entry) for entry in result.rejected],
                "warnings": result.warnings,
            }
        )
        return
    for t, evaluation in enumerate(result.evaluations):
        score = f"{primary.label} {primary.text(factor * evaluation.score):>5}{primary.unit()}"
        time = f"  time {result.times[t]:.4g} s" if result.times else ""
        console.out.print(f"round {t + 1:3d}  {score}  loss {evaluation.loss:.4f}{time}")
    console.note(result.warnings)
    if folder is not None:
        console.say(f"records and the trained model are in {folder.path}")

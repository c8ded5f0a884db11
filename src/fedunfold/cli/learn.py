"""`fedunfold learn`: aggregation weights for an environment, or a pre-trained rule adapted to it."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.fine_tuning import FineTuned
    from fedunfold.rules.learned import LearnedWeights

FOR_RULES = ("adjoint", "iterations", "lr")
"""Options about learning that rules are fine-tuned by too."""


def learn(
    env: opt.Env,
    method: str | None = None,
    start: Annotated[str | None, typer.Option("--from", metavar="RULE")] = None,
    absent_loss: opt.AbsentLoss = "evaluate",
    fraction: float = 1.0,
    *,
    parts: opt.Parts,
    options: opt.RunOptions,
    learning: opt.LearningOptions,
) -> None:
    """Learn aggregation weights for an environment, or adapt a pre-trained rule to it, and save what was learned.

    Args:
        method: What the weights are for: duw-fednova, fedunfold-table, …; by default duw-fedavg.
        start: Adapt the parameters of a rule instead, where that lowers a validation loss: pretrained, open@1 or a rule
            file. Of the options about learning it takes --adjoint, --iterations (3) and --outer-lr.
        absent_loss: Whether absent clients' losses count while weights are learned.
        fraction: Part of its data that each client learns weights with.
    """
    if start is not None:
        _refuse_options_of_tables(method, absent_loss, fraction, learning)
        _fine_tune(env, start, parts, options, learning)
        return
    from fedunfold.api import learn_weights
    from fedunfold.cli.context import environment_of, folder_for, followed, precision_of
    from fedunfold.rules.parametric import ParametricRule
    from fedunfold.runs.artifacts import of_learning
    from fedunfold.training import methods

    environment = environment_of(env, options)
    chosen = methods.changed(methods.method(method or "duw-fedavg"), **asdict(parts))
    if isinstance(chosen.rule, ParametricRule):
        raise InputError(
            f"method {method} needs no learning: run it, or adapt it to the environment with --from; fedunfold-table "
            "learns weights for an environment."
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
        if options.output == "text":
            _suggest_comparison(env, ["fedavg", folder.path / "weights.safetensors"], options)


def _refuse_options_of_tables(
    method: str | None, absent_loss: str, fraction: float, learning: opt.LearningOptions
) -> None:
    """What has no meaning for a rule is not ignored."""
    given = {
        "method": method is not None,
        "absent_loss": absent_loss != "evaluate",
        "fraction": fraction != 1,
        **{name: value is not None for name, value in asdict(learning).items() if name not in FOR_RULES},
    }
    for name in given:
        if given[name]:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is about learning a table of weights; leave it out, or leave out --from.")


def _fine_tune(env: str, start: str, parts: opt.Parts, options: opt.RunOptions, learning: opt.LearningOptions) -> None:
    """Adapt a rule to the environment, and save it."""
    from fedunfold.cli.context import described_rules, environment_of, folder_for, followed, precision_of
    from fedunfold.fine_tuning import fine_tune
    from fedunfold.rules.pretrained import pretrained
    from fedunfold.runs.artifacts import of_fine_tuning
    from fedunfold.runs.schema import RULE
    from fedunfold.training import methods

    environment = environment_of(env, options)
    rule = pretrained() if start == "pretrained" else pretrained(start)
    before = methods.as_method(rule)
    algorithm = methods.changed(before, **asdict(parts)).algorithm
    how: dict[str, Any] = {"steps": learning.iterations, "lr": learning.lr, "adjoint": learning.adjoint}
    how = {name: value for name, value in how.items() if value is not None}
    with folder_for(options, environment) as folder:
        with followed(options, environment, folder) as (progress, tracker):
            try:
                tuned = fine_tune(
                    environment,
                    rule,
                    algorithm=algorithm,
                    checkpoint=folder.checkpoints / "fine-tuning.safetensors",
                    callback=tracker,
                    **how,
                    **precision_of(options),
                )
            except KeyboardInterrupt:
                if not folder.has_checkpoints:
                    raise Stopped("stopped before the rule was validated once; nothing was saved.") from None
                raise Stopped(f"stopped after outer step {progress.steps_made}; the same command resumes.") from None
        settings = {"rules": described_rules([before]), "fine_tuning": tuned.settings}
        written = folder.write(environment, of_fine_tuning(tuned), **settings)
        tracker.on_artifacts(written)
    _show_tuned(tuned, environment, folder.path, options.output)
    if tuned.kept and options.output == "text":
        name = methods.PRETRAINED if start == "pretrained" else start
        _suggest_comparison(env, ["fedavg", name, folder.path / RULE], options)


def _suggest_comparison(env: str, compared: Sequence[str | Path], options: opt.RunOptions) -> None:
    """The command that shows what it brings."""
    names = list(map(str, compared))
    if any("," in name for name in names):  # which separates methods
        return
    same = {"--seed": options.seed, "--rounds": options.rounds}  # of the environment it was learned for
    more = [str(word) for pair in same.items() if pair[1] is not None for word in pair]
    command = shlex.join(["fedunfold", "compare", env, "--methods", ",".join(names), *more])
    console.say(f"to see what it brings: {command}")


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


def _show_tuned(tuned: "FineTuned", environment: "Environment", folder: Path, output: opt.Format) -> None:
    from fedunfold.core.task import finite
    from fedunfold.rules.rule import describe_rule
    from fedunfold.runs.schema import RULE

    file = folder / RULE
    if output == "json":
        console.print_json(
            {
                "environment": environment.name,
                "name": tuned.rule.name,
                "kept": tuned.kept,
                "step": tuned.step,
                "validation_losses": list(map(finite, tuned.losses)),
                "runs": tuned.runs,
                "parameters": describe_rule(tuned.rule)["parameters"],
                "folder": str(folder),
                "file": str(file),
            }
        )
        return
    rows = [(str(m), f"{loss:.4g}") for m, loss in enumerate(tuned.losses)]
    console.out.print(console.table("rows that clients held out", ("after step", "validation loss"), rows, words=()))
    console.say(f"{tuned.verdict}; in {file}")
    console.say(f"price: {tuned.runs} runs of the federation")

"""What a command needs before any work begins: environment, folder, method, threads, trackers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from fedunfold.cli.options import RunOptions
from fedunfold.cli.trackers import ProgressTracker, trackers
from fedunfold.config import Environment, environment
from fedunfold.core.threading import WORTH_THREADS, threads_for
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import describe_rule
from fedunfold.rules.rule_file import is_rule_file, load_rule
from fedunfold.runs.folder import RunFolder
from fedunfold.runs.resume import RunSpec
from fedunfold.tracking import CallbackList
from fedunfold.training.methods import Method, as_method, learned_method

NOT_SPECIFIED = {"out", "overwrite", "resume", "output", "threads", "jobs", "processes", "track"}
"""Where a run is saved, how it is shown and how fast it is: options that do not change what it computes."""


def environment_of(name: str, options: RunOptions) -> Environment:
    """The environment of that name, with the seed, the rounds and the holdout of the command line."""
    given = {"seed": options.seed, "rounds": options.rounds, "holdout": options.holdout}
    changes = {field: value for field, value in given.items() if value is not None}
    found = environment(name)
    return found.replace(**changes) if changes else found


def folder_for(options: RunOptions, environment: Environment, own: Path | None = None) -> RunFolder:
    """Where a run is saved: the folder given, or one of runs/ with the same run unfinished, or a new one there.

    Args:
        options: Those of the command.
        environment: What is run on.
        own: The command's own folder, which it replaces.
    """
    spec, out = run_spec(options.context, environment), options.out or own
    name, overwrite = f"{spec.command}-{environment.name}", options.overwrite or (own is not None and out == own)
    if out is None and not overwrite:
        return RunFolder.unused(name, spec, resume=options.resume)
    return RunFolder(out or RunFolder.named(name), spec, overwrite=overwrite, resume=options.resume)


def run_spec(context: typer.Context, environment: Environment | None = None) -> RunSpec:
    """What the command line specifies, read off the options as they were parsed."""
    arguments: dict[str, Any] = {}
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in NOT_SPECIFIED or value is None or value is False or value in ([], ()):
            continue
        name = parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.name)
        arguments[name] = list(map(str, value)) if isinstance(value, list | tuple) else _plain(value)
    arguments.pop("env", None)  # by its content, not by its name
    texts = [value for value in arguments.values() if isinstance(value, str)]
    parts = [part.strip() for text in texts for part in text.split(",")]
    named = [part for part in parts if part.endswith((".safetensors", ".json", ".toml"))]
    return RunSpec(
        str(context.command.name),
        arguments,
        environment,
        tuple(name for name in named if Path(name).is_file()),
        context.params.get("threads"),
        str(context.params.get("device", "cpu")),
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def followed(
    options: RunOptions, environment: Environment, folder: RunFolder | None
) -> Iterator[tuple[ProgressTracker, CallbackList]]:
    """The run's threads for the work that is worth them, a terminal that shows progress, and all trackers."""
    progress = ProgressTracker()
    with threads_for(WORTH_THREADS, folder.threads if folder else options.threads), progress.bars:
        yield progress, trackers(progress, f"run-{environment.name}", folder, options.track)


def precision_of(options: RunOptions) -> dict[str, Any]:
    """Where and in which precision models are computed, as the library's functions take it."""
    return {"device": options.device, "dtype": getattr(torch, options.dtype)}


def described_rules(methods: Sequence[Method]) -> dict[str, Any]:
    """By the method: its rule's name, and what stands for the rule's weights or parameters."""
    return {method.name: describe_rule(method.rule) for method in methods if method.rule is not None}


def method_from_file(path: Path, environment: Environment, mapped: bool) -> Method:
    """A pre-trained rule as a method, or learned weights, checked against the environment before anything runs."""
    if is_rule_file(path):
        return as_method(load_rule(path))
    data = environment.load()
    learned = LearnedWeights.load(path)
    fitting = learned.adapt(data.keys, environment.rounds, environment.digest(data), allow_mapping=mapped)
    folder = path.resolve().parent.name  # says more than the name that `learn` gives to every file
    return learned_method(fitting, folder if folder and path.stem == "weights" else path.stem)

"""What a command was asked for, found or refused before any work begins: environment, folder, weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.runs.folder import RunFolder
    from fedunfold.runs.resume import RunSpec
    from fedunfold.training.methods import Method

ELSEWHERE = {"out", "overwrite", "resume", "format", "threads", "jobs", "track"}
"""Where a run goes, how it is shown and how fast it is: what does not belong to what was asked for."""


def folder_for(
    command: str, environment: "Environment", out: Path | None, overwrite: bool, resume: bool
) -> "RunFolder":
    """Where a run is kept: the folder asked for, or one of runs/ with the same run unfinished, or that is not taken."""
    from fedunfold.runs.folder import RunFolder

    name, asked = f"{command}-{environment.name}", asked_for(command, environment)
    if out is None and not overwrite:
        return RunFolder.unused(name, asked, resume=resume)
    return RunFolder(out or RunFolder.named(name), asked, overwrite=overwrite, resume=resume)


def asked_for(command: str, environment: "Environment | None" = None) -> "RunSpec":
    """What the command line that is being run asks for, read off the options as they were parsed."""
    from fedunfold.runs.resume import RunSpec

    context = click.get_current_context()
    arguments: dict[str, Any] = {}
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in ELSEWHERE or value is None or value is False or value in ([], ()):
            continue
        name = parameter.opts[0] if isinstance(parameter, click.Option) else str(parameter.name)
        arguments[name] = list(map(str, value)) if isinstance(value, list | tuple) else _plain(value)
    texts = [value for value in arguments.values() if isinstance(value, str)]
    named = [
        part.strip() for text in texts for part in text.split(",") if part.strip().endswith((".safetensors", ".json"))
    ]
    arguments.pop("env", None)  # by its content, not by its name
    return RunSpec(
        command,
        arguments,
        environment,
        tuple(name for name in named if Path(name).is_file()),
        context.params.get("threads"),
        str(context.params.get("device", "cpu")),
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """So many threads for the work that is worth them; as many as torch has where nothing is said."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment_of(name: str, seed: int | None, rounds: int | None) -> "Environment":
    from fedunfold.config import environment

    changes = {field: value for field, value in (("seed", seed), ("rounds", rounds)) if value is not None}
    found = environment(name)
    return found.replace(**changes) if changes else found


def method_from_file(path: Path, environment: "Environment", mapped: bool) -> "Method":
    """Learned weights as a method, checked against the environment before anything runs."""
    from fedunfold.rules.learned import LearnedWeights
    from fedunfold.training.methods import learned_method

    data = environment.load()
    learned = LearnedWeights.load(path)
    fitting = learned.adapt(data.keys, environment.rounds, environment.digest(data), allow_mapping=mapped)
    folder = path.resolve().parent.name  # says more than the name that `learn` gives to every file
    return learned_method(fitting, folder if folder and path.stem == "weights" else path.stem)

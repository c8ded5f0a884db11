"""What a command was asked for, found or refused before any work begins: environment, folder, weights."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedunfold.environments import Environment
    from fedunfold.experiments.methods import Method
    from fedunfold.report.run_folder import RunFolder


def folder_for(command: str, environment: "Environment", out: Path | None, overwrite: bool) -> "RunFolder":
    """Where a run is kept: the folder asked for, or one of runs/ that is not taken."""
    from fedunfold.report.run_folder import RunFolder

    name = f"{command}-{environment.name}"
    if out is None and not overwrite:
        return RunFolder.unused(name)
    return RunFolder(out or RunFolder.named(name), overwrite=overwrite)


def environment_of(name: str, seed: int | None, rounds: int | None) -> "Environment":
    from fedunfold.environments import environment

    changes = {field: value for field, value in (("seed", seed), ("rounds", rounds)) if value is not None}
    found = environment(name)
    return found.with_(**changes) if changes else found


def method_from_file(path: Path, environment: "Environment", mapped: bool) -> "Method":
    """Learned weights as a method, checked against the environment before anything runs."""
    from fedunfold.experiments.methods import learned_method
    from fedunfold.weighting.learned import LearnedWeights

    data = environment.load()
    learned = LearnedWeights.load(path)
    fitting = learned.applied_to(data.keys, environment.rounds, environment.digest(data), mapped=mapped)
    folder = path.resolve().parent.name  # says more than the name that `learn` gives to every file
    return learned_method(fitting, folder if folder and path.stem == "weights" else path.stem)

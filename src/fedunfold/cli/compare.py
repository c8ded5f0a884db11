"""`fedunfold compare`, and `demo`, which is one."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import FedunfoldError, InputError

if TYPE_CHECKING:
    from fedunfold.cli.trackers import ProgressTracker
    from fedunfold.config import Environment
    from fedunfold.training.methods import Method

DEMO = Path("runs/demo")  # the demo's own folder, which it replaces


def demo(options: opt.RunOptions) -> None:
    """FedAvg, weights learned on the embedded digits and the pre-trained rule: table, and figures in runs/demo."""
    _compare("digits-label-skew", ["fedavg", "duw-fedavg", "fedunfold"], options, own=DEMO)


def compare(
    env: opt.Env,
    methods: str = "fedavg,fedunfold",
    trials: opt.Trials = 5,
    aggregator: opt.Part = None,
    leave_out: bool = False,
    personal: Annotated[str | None, typer.Option(metavar="EPOCHS")] = None,
    *,
    parts: opt.Parts,
    options: opt.RunOptions,
    learning: opt.LearningOptions,
) -> None:
    """Compare methods over several trials; those with learned weights (duw-…) learn them first.

    Args:
        methods: Names, and files of learned weights or of pre-trained rules, separated by commas; local, pooled and
            majority are references: each client alone, all rows in one place, no training.
        aggregator: Updates: mean, median, trimmed-mean:fraction=0.2, krum:num_byzantine=1.
        leave_out: Train without each client in turn, and test on its rows.
        personal: Fine-tune the final models at each client for so many epochs, or its own, and test them on what it
            holds out.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if leave_out and options.holdout is not None:
        raise InputError("--leave-out tests on all rows of the client that is left out; leave --holdout out.")
    if leave_out and personal is not None:
        raise InputError("--leave-out tests on clients that train nothing; leave --personal out.")
    given = {**asdict(parts), "aggregator": aggregator}
    if leave_out:
        _leave_out(env, names, options, trials, given, learning)
    else:
        _compare(env, names, options, trials, given, learning, personal=personal)


def _leave_out(
    env: str,
    names: Sequence[str],
    options: opt.RunOptions,
    trials: int,
    parts: dict[str, str | None],
    learning: opt.LearningOptions,
) -> None:
    """Compare the methods without each client, show what came out, and save it."""
    from fedunfold.cli.context import described_rules, environment_of, folder_for, followed, precision_of
    from fedunfold.leave_out import leave_one_out
    from fedunfold.runs.artifacts import of_left_out

    environment = environment_of(env, options)
    with folder_for(options, environment) as folder:
        with followed(options, environment, folder) as (_, tracker):
            chosen = [_chosen(name, environment, parts, learning) for name in names]
            saved, on = folder.checkpoints, precision_of(options)
            found = leave_one_out(environment, chosen, trials=trials, checkpoints=saved, callback=tracker, **on)
        if options.output == "json":
            console.print_json({**found.as_json(), "folder": str(folder.path)})
        else:
            console.out.print(console.table(found.title, found.heads, found.rows()))
        described = {"methods": names, "rules": described_rules(chosen), "learning": learning, "parts": parts}
        tracker.on_artifacts(folder.write(environment, of_left_out(found), **described))
        if options.output == "text":
            console.say(f"the table is in {folder.path}")


def _compare(
    env: str,
    names: Sequence[str],
    options: opt.RunOptions,
    trials: int = 5,
    parts: dict[str, str | None] | None = None,
    learning: opt.LearningOptions | None = None,
    own: Path | None = None,
    personal: str | None = None,
) -> None:
    """Compare the methods, show what came out, and save it; a command that has its own folder also shows weights."""
    from fedunfold import api
    from fedunfold.cli.context import described_rules, environment_of, folder_for, followed, precision_of
    from fedunfold.report.grouping import Group
    from fedunfold.report.verdict import verdict
    from fedunfold.report.warnings import warnings
    from fedunfold.runs.artifacts import of_comparison
    from fedunfold.runs.compared import run_of

    environment = environment_of(env, options)
    ending: Stopped | FedunfoldError | None = None
    with folder_for(options, environment, own) as folder:
        with followed(options, environment, folder) as (progress, tracker):
            try:
                chosen = [_chosen(name, environment, parts or {}, learning) for name in names]
                saved, on = folder.checkpoints, precision_of(options)
                on |= {"checkpoints": saved, "callback": tracker, "personal": _epochs(personal)}
                comparison = api.compare(environment, chosen, trials=trials, **on)
            except KeyboardInterrupt:
                comparison, ending = progress.so_far(environment.name), _stopped(progress, folder.path)
                if not progress.runs and not progress.learned:
                    raise ending from None
            except FedunfoldError as error:
                # A method that failed in a later trial is left out: its mean would be over the lucky ones.
                comparison, ending = progress.so_far(environment.name, at_least=trials), error
                if not comparison.methods:
                    raise
        # Shown before it is written: a disk that is full by now must not take the table along.
        compared = Group((run_of(environment, comparison),)) if comparison.methods else None
        if compared is not None and options.output == "json":
            stopped = {"stopped": True} if isinstance(ending, Stopped) else {}
            found = verdict(compared)
            opening = {"verdict": None if found is None else found.as_json(), "warnings": warnings(compared)}
            console.print_json({**opening, **comparison.as_json(), "folder": str(folder.path), **stopped})
        elif compared is not None:
            console.say_verdict(verdict(compared), warnings(compared))
            console.out.print(console.comparison_table(comparison))
            if comparison.by_client is not None:
                console.out.print(console.table(*comparison.by_client))
            for result in comparison.methods if own else ():
                if result.learned is not None:
                    console.out.print(console.weights_table(result.learned))
            for result in comparison.methods:
                console.note(result.warnings, result.name)
        unfinished = {} if isinstance(ending, FedunfoldError) else progress.learned
        files = of_comparison(environment, comparison, unfinished)
        described = {"methods": names, "rules": described_rules(chosen), "learning": learning, "parts": parts}
        written = folder.write(environment, files, **described, trials=trials)
        tracker.on_artifacts(written)
        if options.output == "text":
            console.say(f"records and figures are in {folder.path}")
        if ending is not None:
            raise ending


def _stopped(progress: "ProgressTracker", folder: Path) -> Stopped:
    """What Ctrl-C leaves."""
    if progress.runs:
        return Stopped(f"stopped; what was finished is shown and saved in {folder}, and the same command resumes.")
    if progress.learned:
        where = f"weights so far are saved in {folder}, and the same command resumes"
        return Stopped(f"stopped before the first trial ended; {where}.")
    return Stopped("stopped before the first trial ended; nothing was saved.")


def _epochs(personal: str | None) -> Any:
    """A number of epochs, or what was typed in the place of one."""
    return int(personal) if personal is not None and personal.isdecimal() else personal


def _chosen(
    name: str, environment: "Environment", parts: dict[str, str | None], learning: opt.LearningOptions | None
) -> "Method":
    """A method by its name or by the file of its weights, with the parts and the learning given."""
    from fedunfold.cli.context import method_from_file
    from fedunfold.training.methods import as_compared, changed

    named = method_from_file(Path(name), environment, False) if name.endswith(".safetensors") else as_compared(name)
    named = changed(named, **parts)
    return named if learning is None else replace(named, learning=learning.applied_to(named.learning, environment))

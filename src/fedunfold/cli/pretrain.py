"""`fedunfold pretrain`: a rule of one's own, learned over many drawn federations."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.pretraining.learner import Pretraining, Progress


def pretrain(
    context: typer.Context,
    settings: Annotated[Path | None, typer.Argument(metavar="[SETTINGS]")] = None,
    name: str | None = None,
    processes: Annotated[int | None, typer.Option(min=1)] = None,
    out: opt.Folder = None,
    overwrite: bool = False,
    resume: opt.Resume = False,
    track: Annotated[list[str] | None, typer.Option(metavar="WHERE")] = None,
    output: opt.Format = "text",
) -> None:
    """Learn a rule over many drawn federations, for federations it has never met, and save it with a model card.

    Args:
        context: The command that was typed.
        settings: A .toml file with fields of Pretraining; what is not in it has its default.
        name: What the rule is called, such as clinics@1; by default what the settings say.
        processes: Federations at work at a time; by default as many as there are cores.
        out: Folder for the rule; a new one of runs/.
        overwrite: Replace what the folder holds already.
        track: Follow it also in tensorboard[:DIR] or mlflow[:FILE or address]; may be given twice.
    """
    from fedunfold.cli.context import run_spec
    from fedunfold.cli.trackers import ProgressTracker, trackers
    from fedunfold.pretraining import learner
    from fedunfold.runs.artifacts import of_pretraining
    from fedunfold.runs.folder import RunFolder
    from fedunfold.tracking import callback_scope
    from fedunfold.version import VERSION

    how = _settings(settings, name)
    spec, called = run_spec(context), f"pretrain-{how.name}"
    if out is None and not overwrite:
        opened = RunFolder.unused(called, spec, resume=resume)
    else:
        opened = RunFolder(out or RunFolder.named(called), spec, overwrite=overwrite, resume=resume)
    described = {"version": VERSION, **how.model_dump(mode="json")}
    with opened as folder:
        shown = ProgressTracker()
        follow = trackers(shown, called, folder, track)

        def report(progress: "Progress") -> None:
            follow.on_pretraining_step(len(progress.losses), how.steps, _values(progress))

        try:
            with shown.bars, callback_scope(follow, {"command": "pretrain", "clients": [], **described}):
                learned = learner.pretrain(
                    how,
                    processes=processes or os.cpu_count() or 1,
                    checkpoint=folder.checkpoints / "pretraining.safetensors",
                    on_step=report,
                )
        except KeyboardInterrupt:
            if not folder.has_checkpoints:
                raise Stopped("stopped before it began; nothing was saved.") from None
            done = f"after {shown.steps_made} of {how.steps} steps" if shown.steps_made else "before its first new step"
            raise Stopped(f"stopped {done}; the same command resumes.") from None
        follow.on_artifacts(folder.write_files(of_pretraining(how, learned), described))
    _show(how, learned, folder.path, output)


def _settings(file: Path | None, name: str | None) -> "Pretraining":
    """Those of a file, or the defaults, under another name where one is given."""
    from fedunfold.core.parts import SERVER_OPTIMIZERS
    from fedunfold.io.atomic import is_plain_file, parse_toml, read_text
    from fedunfold.pretraining.learner import Pretraining

    if file is None:
        return Pretraining() if name is None else Pretraining(name=name)
    if not is_plain_file(file):
        raise InputError(f"there is no settings file {file}; check the path.")
    try:
        given = parse_toml(read_text(file))
        found = Pretraining(**given if name is None else given | {"name": name})
        try:
            SERVER_OPTIMIZERS.parse(found.server)
        except InputError as error:
            raise InputError(f"field server: {error}") from error
        return found
    except InputError as error:
        raise InputError(f"settings file {file}: {str(error).removeprefix('Pretraining: ')}") from error


def _values(progress: "Progress") -> dict[str, float]:
    """What a tracker is given after a step."""
    step, made = len(progress.losses), progress.validations[-1:]
    found = {"loss": progress.losses[-1]}
    for name in ("mean", "worst", "path", "worst_path", "wins"):
        found |= {f"validation_{name}": getattr(each, name) for each in made if each.step == step}
    return found


def _show(settings: "Pretraining", learned: "Progress", folder: Path, output: opt.Format) -> None:
    from dataclasses import asdict

    from fedunfold.pretraining.learner import GAINS
    from fedunfold.rules.rule import describe_rule
    from fedunfold.rules.rule_file import load_rule
    from fedunfold.runs.schema import CARD, RULE

    file = folder / RULE
    if output == "json":
        console.print_json(
            {
                "name": settings.name,
                "steps": len(learned.losses),
                "losses": learned.losses,
                "validations": [asdict(made) for made in learned.validations],
                "chosen": asdict(learned.chosen),
                "parameters": describe_rule(load_rule(file))["parameters"],
                "folder": str(folder),
                "file": str(file),
            }
        )
        return
    rows = [
        (str(made.step), *(f"{v:+.2f}" for v in made.gains), f"{100 * made.wins:.0f}") for made in learned.validations
    ]
    heads = ("after step", *GAINS, "federations with a gain (%)")
    console.out.print(console.table("points above FedAvg on federations drawn apart", heads, rows, words=()))
    console.say(f"{settings.name} is the rule after step {learned.chosen.step}; in {file}, its card in {folder / CARD}")

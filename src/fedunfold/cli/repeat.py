"""`fedunfold repeat`: a run again, from the settings in its folder, and whether the same came out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.runs.manifest import InputFile, RunManifest

DIFFERENT = 1


def repeat(
    run: Annotated[Path, typer.Argument(metavar="RUN")], out: opt.Folder = None, output: opt.Format = "text"
) -> None:
    """Run a finished run again into a new folder, and say whether the same bytes came out (exit code 0) or not (1).

    Args:
        run: A folder that learn, run, compare, reproduce, benchmark or pretrain left.
        out: Folder for the run again; a new one of runs/.
    """
    from contextlib import redirect_stdout
    from io import StringIO

    from fedunfold.cli.app import app
    from fedunfold.runs.reader import has_ended, read_manifest
    from fedunfold.runs.system_info import machine

    settings = read_manifest(run)
    folder = _new_folder(run) if out is None else out
    if has_ended(folder):
        raise InputError(f"{folder} already holds a run; choose another --out.")
    with redirect_stdout(StringIO()):  # what the command shows has been seen
        app(args=[*_command_line(run, settings), "--out", str(folder)], standalone_mode=False)
    different = [name for name in settings.compared if not _same(run / name, folder / name)]
    then, now = settings.machine, machine(str(settings.arguments.get("--device", "cpu")))
    elsewhere = {name: [then.get(name), now[name]] for name in now if name != "cores" and then.get(name) != now[name]}
    if output == "json":
        console.print_json(
            {"folder": str(folder), "same": not different, "different": different, "elsewhere": elsewhere}
        )
    else:
        verdict = f"different: {', '.join(different)}" if different else f"same: {', '.join(settings.compared)}"
        console.say(f"{verdict}; {run} again in {folder}")
        for name, (before, after) in elsewhere.items():
            console.say(f"note: {name} was {before} and is {after}")
    if different:
        raise typer.Exit(DIFFERENT)


def _new_folder(run: Path) -> Path:
    """A name in runs/ that is free, or whose repetition did not end and is resumed."""
    from fedunfold.runs.folder import RunFolder, numbered
    from fedunfold.runs.reader import has_ended

    names = numbered(f"repeat-{run.resolve().name}")
    return next(path for path in map(RunFolder.named, names) if not has_ended(path))


def _command_line(run: Path, settings: "RunManifest") -> list[str]:
    """The command that was run, with its environment and files as they are found from its folder."""
    moved = {entry.given: _found(run, entry) for entry in settings.inputs}
    line: list[str] = [settings.command]
    if settings.command in ("learn", "run", "compare"):
        line.append(str(run / "environment.toml"))
    for name, value in settings.arguments.items():
        for single in value if isinstance(value, list) else [value]:
            text = ",".join(moved.get(part.strip(), part) for part in str(single).split(","))
            if not name.startswith("-"):
                line.append(text)
            else:
                line += [name] if single is True else [name, text]
    return (
        line
        if settings.command in ("reproduce", "benchmark", "pretrain")
        else [*line, "--threads", str(settings.threads)]
    )


def _found(run: Path, entry: "InputFile") -> str:
    from fedunfold.runs.resume import digest_of_file

    path = run / entry.path
    if digest_of_file(path) != entry.sha256:
        raise InputError(f"{path} is not the file that the run in {run} used; bring that one back.")
    return str(path)


def _same(before: Path, after: Path) -> bool:
    from fedunfold.io.atomic import is_plain_file

    return is_plain_file(before) and is_plain_file(after) and before.read_bytes() == after.read_bytes()

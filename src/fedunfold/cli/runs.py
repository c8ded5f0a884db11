"""`fedunfold runs`: the runs in a folder."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.cli.commands import CommandGroup
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.runs.catalog import RunSummary

app = CommandGroup("List, show, compare and delete runs.")

In = Annotated[Path, typer.Option("--in", metavar="DIR", help="The folder that holds the runs.")]
Names = Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs, as `fedunfold runs list` shows.")]
RUNS = Path("runs")


@app.example("fedunfold runs list")
def list_(folder: In = RUNS, output: opt.Format = "text") -> None:
    """All runs in a folder: what they were, what came out, and whether they are whole."""
    from fedunfold.runs.catalog import runs_in

    found = runs_in(folder)
    if output == "json":
        console.print_json([run.as_json() for run in found])
        return
    if not found:
        console.say(f"{folder} holds no runs; `fedunfold demo` makes one.")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("run", "what", "methods", "result", "state"):
        table.add_column(name, overflow="fold", no_wrap=name == "state")
    for run in found:
        # A rule is learned in no single environment; it has a name.
        of = run.settings.get("environment", run.settings.get("name", "?"))
        about = str(run.settings.get("command", "?")), str(of)
        names = [str(row.get("method", "learned")) for row in run.results] or run.methods
        made = run.made.astimezone().strftime("%Y-%m-%d %H:%M") if run.made else ""
        state = f"{run.state}, {decimal(run.size)}\n{made}"
        table.add_row(*map(_cell, (run.name, "\n".join(about), "\n".join(names), _outcome(run), state)))
    console.out.print(table)
    _say_problems(found)


@app.example("fedunfold runs show demo")
def show(run: Annotated[str, typer.Argument(metavar="RUN")], folder: In = RUNS, output: opt.Format = "text") -> None:
    """Settings and results of one run.

    Args:
        run: Its name, as `fedunfold runs list` shows.
    """
    from fedunfold.runs.catalog import find_run
    from fedunfold.tracking.scalars import flattened

    found = find_run(run, folder)
    if output == "json":
        files = [str(file) for file in found.files]
        console.print_json({**found.as_json(), "settings": dict(found.settings), "files": files})
        return
    settings = flattened({name: value for name, value in found.settings.items() if name != "files"})
    shown = {name: [value] for name, value in settings.items() if value not in (None, "", "[]")}
    console.out.print(_table(("setting", "value"), shown))
    measures = found.measures
    rows = {row.get("method", "learned"): [_number(row.get(name)) for name in measures] for row in found.results}
    if rows:
        console.out.print(_table(("method", *(name.replace("_", " ") for name in measures)), rows))
    console.say(f"{found.path}: {found.state}, {_files([found])}, {decimal(found.size)}")
    _say_problems([found])


@app.example("fedunfold runs compare demo compare-digits-flaky")
def compare(runs: Names, folder: In = RUNS, output: opt.Format = "text") -> None:
    """Settings that differ, and results, in columns."""
    from fedunfold.runs.catalog import differing

    found = _found(runs, folder)
    if len(found) < 2:
        raise InputError("comparing takes two runs or more; one is shown by `fedunfold runs show`.")
    settings, results = differing(found)
    if output == "json":
        console.print_json({"runs": [run.as_json() for run in found], "settings": settings, "results": results})
        return
    names = [run.name for run in found]
    console.out.print(_table(("differing setting", *names), settings))
    console.out.print(_table(("result", *names), {name: list(map(_number, row)) for name, row in results.items()}))
    _say_problems(found)


@app.example("fedunfold runs rm compare-digits-flaky-2")
def rm(runs: Names, folder: In = RUNS, yes: bool = False, output: opt.Format = "text") -> None:
    """Delete runs: the files that they recorded, and nothing else.

    Args:
        yes: Do not ask.
    """
    from fedunfold.runs.catalog import delete_run, locked

    found = _found(runs, folder)
    if not yes:
        _ask(found)
    with locked(found):
        left = [(run, delete_run(run)) for run in found]
    if output == "json":
        console.print_json([{"name": run.name, "deleted": len(run.files), "left": names} for run, names in left])
        return
    for run, names in left:
        stays = f"; not the run's, and still there: {', '.join(names)}" if names else ""
        console.say(f"deleted {_files([run])} of {run.path}{stays}")


def _found(names: list[str], folder: Path) -> "list[RunSummary]":
    """Each once, all of them before anything is done."""
    from fedunfold.runs.catalog import find_run

    return list({run.path: run for run in (find_run(name, folder) for name in names)}.values())


def _ask(runs: "list[RunSummary]") -> None:
    if not sys.stdin.isatty():
        raise InputError("deleting needs a confirmation, and this is no terminal; confirm with --yes.")
    names = ", ".join(str(run.path) for run in runs)
    try:
        agreed = typer.confirm(f"Delete {_files(runs)} of {names}?", err=True)
    except typer.Abort:
        sys.stderr.write("\n")  # Ctrl-C and Ctrl-D leave the cursor behind the question
        agreed = False
    if not agreed:
        raise Stopped("stopped; nothing was deleted.")


def _say_problems(runs: "list[RunSummary]") -> None:
    for run in runs:
        if run.problem:
            console.say(f"{_cell(run.name)}: {run.state}, {_cell(run.problem)}.")


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> Table:
    table = Table()
    for name in columns:
        table.add_column(_cell(name), overflow="fold")
    for name, values in rows.items():
        table.add_row(_cell(name), *("" if value is None else _cell(value) for value in values))
    return table


def _cell(value: Any) -> Text:
    """As it stands in the file: no markup, and nothing that a terminal would obey."""
    shown = (sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in str(value))
    return Text("".join(shown))


def _outcome(run: "RunSummary") -> str:
    """A line for each method: its score, or the outer loss."""
    lines, primary = [], run.primary
    named = "" if primary.is_accuracy else f"{primary.label} "
    for row in run.results:
        score = row.get(f"{primary.name}_mean", row.get(primary.name))
        loss = _number(row.get("outer_loss"))
        shown = None if score is None else f"{named}{primary.text(score)}{primary.unit()}"
        lines.append(shown if shown is not None else f"loss {loss}" if loss else "")
    return "\n".join(lines)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.5g}"


def _files(runs: "Sequence[RunSummary]") -> str:
    count = sum(len(run.files) for run in runs)
    return f"{count} file{'' if count == 1 else 's'}"

"""`fedunfold benchmark`: methods beside each other, with settings chosen by the same budget."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

REPORT_SECONDS = 60.0
log = logging.getLogger(__name__)


def _bundled(incomplete: str) -> list[str]:
    """Names for the shell to complete; files are completed by the shell itself."""
    from importlib import resources

    folder = resources.files("fedunfold") / "studies" / "benchmark" / "suites"
    return sorted(name for file in folder.iterdir() if (name := file.name.removesuffix(".toml")).startswith(incomplete))


def _reporter(bars: Any, title: str, todo: Sequence[Any]) -> Callable[[str, float], None]:
    """A function that shows the progress of a phase: by a bar, or where there is no terminal by a line a minute."""
    total, began = sum(run.cost for run in todo), time.monotonic()
    bar, done, said = bars.add_task(title, total=total, note=""), 0.0, began

    def report(name: str, cost: float) -> None:
        nonlocal done, said
        done, now = done + cost, time.monotonic()
        bars.update(bar, advance=cost, note=name)
        if not console.err.is_terminal and now - said >= REPORT_SECONDS and done > 0:
            said, left = now, (now - began) * (total / done - 1) / 60
            log.info("%s: %.0f %% done, about %.0f min left; now %s", title, 100 * done / total, left, name)

    return report


def benchmark(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(metavar="SUITE", autocompletion=_bundled)],
    out: opt.Folder = None,
    methods: Annotated[str | None, typer.Option(metavar="NAMES")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ENV")] = None,
    trials: Annotated[int | None, typer.Option(min=1)] = None,
    processes: Annotated[int | None, typer.Option(min=1)] = None,
    device: opt.Device = "cpu",
    page: bool = False,
    output: opt.Format = "text",
    resume: opt.Resume = False,
) -> None:
    """Compare methods on a suite of environments, with settings chosen on validation rows; resumes where it stopped.

    Args:
        context: The command that was typed.
        suite: paper, natural, cross-device, devices, demo (digits, minutes), or a .toml file of your own.
        out: Folder for records and results; by default runs/benchmark-SUITE.
        methods: Names, separated by commas; by default the suite's, else all that a benchmark knows.
        only: Just this environment; may be repeated.
        trials: Runs of each method, in the place of the suite's number.
        processes: Processes at work, one thread each; as many as there are cores.
        page: Run nothing; make page, table and diagrams again from the records.
    """
    import torch

    from fedunfold.cli.context import run_spec
    from fedunfold.core.params import device_of
    from fedunfold.io.atomic import FolderLock, remove_stale_temp_files
    from fedunfold.runs.folder import make_writable, write_settings
    from fedunfold.studies.benchmark.contenders import contenders
    from fedunfold.studies.benchmark.page import RECORDS, RESULTS, write_page
    from fedunfold.studies.benchmark.plan import Plan, carry_out
    from fedunfold.studies.benchmark.records import RunRecords
    from fedunfold.studies.benchmark.suites import find_suite

    described, beside = find_suite(suite)
    folder = out or Path("runs") / f"benchmark-{described.name}"
    records = RunRecords(folder / RECORDS)
    if (resume or page) and not records.begun:
        raise InputError(f"{folder} holds no records; leave out {'--page' if page else '--resume'} to begin.")
    began, made = time.monotonic(), 0
    if not page:
        names = [name.strip() for name in (methods or "").split(",") if name.strip()] or described.methods
        chosen = contenders(names, described.contenders, described.without)
        plan = Plan.of(described, beside, chosen, only or (), trials, device)
        for name, reason in plan.left_out.items():
            console.warn(f"{name} is left out: {reason}")
        device_of(device)
    make_writable(folder)
    with FolderLock(folder):
        remove_stale_temp_files(folder, RECORDS)
        if not page:
            workers = processes or (torch.get_num_threads() if device == "cpu" else 1)
            with console.progress() as bars:
                try:
                    made = carry_out(plan, records, workers, partial(_reporter, bars))
                except KeyboardInterrupt:
                    raise Stopped(f"stopped; the same command resumes from the records in {records.folder}.") from None
        file = write_page(folder)
        if not page:
            write_settings(folder, run_spec(context), threads=1, files=[RESULTS])
    seconds = time.monotonic() - began
    if output == "json":
        found = {"page": str(file), "results": str(folder / RESULTS), "computed": made, "seconds": seconds}
        console.print_json(found)
    else:
        console.say(f"{made} runs made in {seconds:.0f} s; the page is {file}")

"""`fedunfold reproduce`: the paper's experiments, and ours beyond it."""

import logging
import shlex
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

log = logging.getLogger(__name__)


def reproduce(
    context: typer.Context,
    study: Literal["mnist", "rate", "dogs", "variants", "digits", "attack", "all"],
    out: opt.Folder = None,
    trials: opt.Trials = 10,
    schedule: opt.Schedule = "fast",
    assignment: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    jobs: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: opt.Device = "cpu",
    output: opt.Format = "text",
    resume: opt.Resume = False,
) -> None:
    """Run the paper's experiments and write its figures and tables; resumes where an earlier call stopped.

    Args:
        context: The command that was typed.
        study: The paper's experiments; the variants our recommended setting was chosen among; digits, the paper's four
            kinds of skew on data that is installed with scikit-learn; or attack, digits with bad clients.
        out: Folder for records and results.
        schedule: Outer iterations and step: fast, or as published for the environment.
        assignment: Classes and shares per client for dogs (JSON).
        only: Just this environment or method; may be repeated.
        jobs: Processes at work, one thread each; as many as there are cores.
        seed: Randomness of training.
    """
    import torch

    from fedunfold.cli.context import run_spec
    from fedunfold.core.params import device_of
    from fedunfold.io.atomic import FolderLock, remove_stale_temp_files
    from fedunfold.runs.folder import make_writable, write_settings
    from fedunfold.studies.cases import STUDIES, Setting
    from fedunfold.studies.jobs import list_jobs
    from fedunfold.studies.processes import run_jobs
    from fedunfold.studies.records import StudyRecords, check_same
    from fedunfold.studies.results import Results

    setting = Setting(schedule, trials, seed, device)
    folder = out or Path("runs") / f"reproduce-{study}"
    wanted = STUDIES if study == "all" else (study,)
    results = Results.of(wanted, setting, assignment, only or ())
    made = make_writable(folder)
    records = StudyRecords(folder / "records")
    if resume and not records.begun:
        if made:
            folder.rmdir()
        raise InputError(f"{folder} holds no records to resume from; leave out --resume to begin.")
    with FolderLock(folder):
        remove_stale_temp_files(folder, "records")
        check_same(records, setting, [case for case, _ in results.cases()])
        every = [job for case, rows in results.cases() for job in list_jobs(case, rows)]
        todo = [job for job in every if not job.done(records)]
        for job in every:
            if job not in todo:
                job.clean_up(records)
        if 0 < len(todo) < len(every):
            log.info("resuming: %d of %d records are in %s", len(every) - len(todo), len(every), records.folder)
        if todo:
            device_of(device)
        began = time.monotonic()
        with console.progress() as bars:
            bar = bars.add_task("reproducing", total=sum(job.cost for job in todo), note="")
            try:
                run_jobs(
                    todo,
                    records,
                    device,
                    jobs or (torch.get_num_threads() if device == "cpu" else 1),
                    lambda name, cost: bars.update(bar, advance=cost, note=name),
                )
            except KeyboardInterrupt:
                raise Stopped(f"stopped; the same command resumes from the records in {records.folder}.") from None
        given = [("--assignment", assignment and assignment.name), ("--trials", trials), ("--seed", seed)]
        given += [("--schedule", schedule), ("--device", device), *(("--only", name) for name in only or ())]
        options = [str(part) for option, value in given if value is not None for part in (option, value)]
        command = shlex.join(["fedunfold", "reproduce", study, *options])
        file = results.write(folder, command, records, computed=bool(todo))
        write_settings(folder, run_spec(context), threads=1, files=results.files(records))
    seconds = time.monotonic() - began
    if output == "json":
        console.print_json({"results": str(file), "computed": len(todo), "seconds": seconds})
    else:
        console.say(f"{len(todo)} records made in {seconds:.0f} s; results are in {file}")

"""`fedunfold reproduce`: the paper's experiments."""

import shlex
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import options as opt


class Experiments(StrEnum):
    mnist = "mnist"
    rate = "rate"
    dogs = "dogs"
    all = "all"


def reproduce(
    experiments: Annotated[Experiments, typer.Argument(help="Which of the paper's experiments.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for records and results.")] = None,
    trials: opt.Trials = 10,
    schedule: opt.ScheduleOption = opt.Schedule.fast,
    assignment: Annotated[
        Path | None,
        typer.Option("--assignment", metavar="FILE", help="Classes and shares per client for dogs (JSON)."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ENV", help="Just this environment; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Randomness of training.")] = 0,
    device: opt.Device = "cpu",
    format: opt.FormatOption = opt.Format.text,
) -> None:
    """Run the paper's experiments and write its figures and tables; goes on where an earlier call stopped."""
    from typing import get_args

    from fedunfold.cli import console
    from fedunfold.experiments import reproduction as rep
    from fedunfold.report.paper import write_results
    from fedunfold.report.run_folder import RunFolder

    setting = rep.Setting(schedule.value, trials, seed, device)
    folder = RunFolder(out or Path("runs") / f"reproduce-{experiments.value}")
    records = rep.Records(folder.path / "records")
    wanted = get_args(rep.Study) if experiments is Experiments.all else (experiments.value,)
    studies = {}
    for study in wanted:
        envs = rep.environments(study, setting, assignment if study == "dogs" else None)
        envs = [env for env in envs if not only or env.name in only]
        if envs:
            studies[study] = envs
    rep.check_same(records, setting)
    todo = [
        task
        for study, envs in studies.items()
        for env in envs
        for task in (rep.rate_tasks if study == "rate" else rep.tasks)(env, setting, records)
        if not task.done()
    ]
    began = time.monotonic()
    with console.progress() as bars:
        bar = bars.add_task("reproducing", total=len(todo), note="")
        try:
            for task in todo:
                bars.update(bar, note=task.name)
                task.do()
                bars.advance(bar)
        except KeyboardInterrupt:
            sys.stderr.write(f"stopped; the same command goes on from the records in {records.folder}.\n")
            raise typer.Exit(130) from None
    command = shlex.join(["fedunfold", "reproduce", experiments.value, "--schedule", schedule.value])
    file = write_results(folder.path, command, setting, studies, records)
    seconds = time.monotonic() - began
    if format is opt.Format.json:
        console.print_json({"results": str(file), "computed": len(todo), "seconds": seconds})
    else:
        console.out.print(f"{len(todo)} records made in {seconds:.0f} s; results are in {file}", soft_wrap=True)

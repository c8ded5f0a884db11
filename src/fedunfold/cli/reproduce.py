"""`fedunfold reproduce`: the paper's experiments."""

import shlex
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedunfold.cli import Stopped
from fedunfold.cli import options as opt


def reproduce(
    experiments: Annotated[
        Literal["mnist", "rate", "dogs", "all"], typer.Argument(help="Which of the paper's experiments.")
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for records and results.")] = None,
    trials: opt.Trials = 10,
    schedule: opt.Schedule = "fast",
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
    format: opt.Format = "text",
) -> None:
    """Run the paper's experiments and write its figures and tables; goes on where an earlier call stopped."""
    from typing import get_args

    from fedunfold.cli import console
    from fedunfold.experiments import reproduction as rep
    from fedunfold.report.paper import write_results
    from fedunfold.report.run_folder import make_writable

    setting = rep.Setting(schedule, trials, seed, device)
    folder = out or Path("runs") / f"reproduce-{experiments}"
    make_writable(folder)
    records = rep.Records(folder / "records")
    wanted = get_args(rep.Study) if experiments == "all" else (experiments,)
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
            raise Stopped(f"stopped; the same command goes on from the records in {records.folder}.") from None
    command = shlex.join(["fedunfold", "reproduce", experiments, "--schedule", schedule])
    file = write_results(folder, command, setting, studies, records)
    seconds = time.monotonic() - began
    if format == "json":
        console.print_json({"results": str(file), "computed": len(todo), "seconds": seconds})
    else:
        console.say(f"{len(todo)} records made in {seconds:.0f} s; results are in {file}")

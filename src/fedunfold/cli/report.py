"""`fedunfold report`: one HTML file about one run or several."""

from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    output: opt.Format = "text",
) -> None:
    """Make one HTML file that opens without a network: findings, accuracy, weights, classes, clients, settings.

    Args:
        runs: Folders that `fedunfold learn`, `run` or `compare` left behind.
        out: The HTML file; report.html in the folder where it is one run.
    """
    from fedunfold.io.atomic import write_atomically
    from fedunfold.report.render import build, require_extra
    from fedunfold.runs.reader import read_runs
    from fedunfold.runs.schema import REPORT

    if out is None and len(runs) > 1:
        raise InputError("several runs have no folder of their own for the report; name its file with --out.")
    file = out or runs[0] / REPORT
    if file.is_dir():
        raise InputError(f"{file} is a folder; name a file with --out, such as {file / REPORT}.")
    require_extra()
    page = build(read_runs(runs))
    write_atomically(file, lambda temporary: temporary.write_text(page.html, encoding="utf-8"))
    if output == "json":
        verdicts = [
            {"about": about, **said.verdict.as_json()}
            for about, said in page.summaries.items()
            if said.verdict is not None
        ]
        findings = [
            {"about": about, "kind": kind, "text": text}
            for about, said in page.summaries.items()
            for kind, texts in (
                ("warning", said.findings.warnings),
                ("first", said.findings.first),
                ("more", said.findings.more),
            )
            for text in texts
        ]
        named = [str(run) for run in runs]
        console.print_json({"file": str(file), "runs": named, "verdicts": verdicts, "findings": findings})
        return
    for about, said in page.summaries.items():
        if len(page.summaries) > 1:
            console.say(about)
        console.say_verdict(said.verdict, said.findings.warnings)
        for text in said.findings.first:
            console.say(f"- {text}")
        if more := len(said.findings.more):
            console.say(f"- {more} more finding{'s are' if more > 1 else ' is'} in the report")
    console.say(f"the report is in {file}")

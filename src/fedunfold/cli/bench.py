"""`fedunfold bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import options as opt
from fedunfold.errors import InputError


def bench(
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each thing is measured.")] = 5,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write what was measured as a Markdown page.")
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--other", metavar="NAME=COMMAND", help="Another simulator to measure; see benchmarks/README.md."),
    ] = None,
    format: opt.Format = "text",
) -> None:
    """Measure the engine beside a plain loop, autograd through all rounds and Flower's simulation; takes minutes."""
    from fedunfold import bench as measured
    from fedunfold.cli import console
    from fedunfold.files import write_atomically

    with console.progress() as bars:
        bar = bars.add_task("measuring", total=None, note="")
        found = measured.measure(repeats, _commands(other or ()), lambda what: bars.update(bar, note=what))
    text = measured.page(found)
    if page is not None:
        write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if format == "json":
        console.print_json(found.as_json())
    else:
        console.say(text)


def _commands(others: Sequence[str]) -> dict[str, str]:
    parted = [other.partition("=") for other in others]
    for name, _, command in parted:
        if not name or not command:
            raise InputError(f"--other {name}: give it as NAME=COMMAND.")
    return {name: command for name, _, command in parted}

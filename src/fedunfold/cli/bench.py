"""`fedunfold bench`."""

from pathlib import Path
from typing import Annotated

import typer

from fedunfold.cli import options as opt


def bench(
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each thing is measured.")] = 5,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write what was measured as a Markdown page.")
    ] = None,
    format: opt.Format = "text",
) -> None:
    """Measure the engine beside a plain loop, autograd through all rounds and Flower's simulation; takes minutes."""
    from fedunfold import bench as measured
    from fedunfold.cli import console
    from fedunfold.files import write_atomically

    with console.progress() as bars:
        bar = bars.add_task("measuring", total=None, note="")
        found = measured.measure(repeats, lambda what: bars.update(bar, note=what))
    text = measured.page(found)
    if page is not None:
        write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if format == "json":
        console.print_json(found.as_json())
    else:
        console.say(text)

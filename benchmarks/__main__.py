"""`fedunfold bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError


def bench(
    what: Annotated[
        Literal["engine", "schedules", "device"],
        typer.Argument(
            help="The engine beside others, the fast schedule of the learning beside the paper's, or a device's times."
        ),
    ] = "engine",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each thing is measured.")] = 5,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write what was measured as a Markdown page.")
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--other", metavar="NAME=COMMAND", help="Another simulator to measure; see benchmarks/README.md."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="ENV", help="Of schedules and device; digits-label-skew.")
    ] = None,
    device: opt.Device = "cpu",
    format: opt.Format = "text",
) -> None:
    """Measure the engine beside a plain loop, autograd through all rounds and Flower's simulation; takes minutes.

    With `schedules`: outer loss and accuracy against the time that learning takes, by the fast schedule and the
    paper's. With `device`: what local steps, learnings and runs take on the CPU or a GPU.
    """
    import benchmarks as measured
    from fedunfold.cli import console
    from fedunfold.io.atomic import write_atomically
    from fedunfold.plotting import save

    found: measured.Bench | measured.Schedules | measured.DeviceBench
    figure = None
    with console.progress() as bars:
        bar = bars.add_task("measuring", total=None, note="")

        def say(now: str) -> None:
            bars.update(bar, note=now)

        file = (page or Path(f"{what}.md")).with_suffix(".png")
        if what == "engine":
            found = measured.measure(repeats, _commands(other or ()), say)
            text, figure = measured.page(found, file.name), measured.growth_figure(found.scaling)
        elif what == "schedules":
            found = measured.measure_schedules(env or ["digits-label-skew"], device, say)
            text, figure = measured.schedules_page(found, file.name), measured.schedules_figure(found)
        else:
            found = measured.measure_device(env or ["digits-label-skew"], device, repeats, say)
            text = measured.device_page(found)
    if page is not None:
        if figure is not None:
            save(figure, file)
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

"""The benchmark as a page of the documentation, written from what was measured."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.scaling import Scaling
from benchmarks.timing import Bench, Timed
from fedunfold.config import environment
from fedunfold.plotting import COLOURS, MARKERS
from fedunfold.unfolding import Learning


def page_of(bench: Bench, figure: str) -> str:
    """Markdown; `figure` is the name of the picture of `growth_figure`."""
    engine, machine = bench.round["engine"].median, bench.machine
    parts = [
        "# Benchmarks\n",
        "Made by `python -m benchmarks engine`: ratios of things measured in turn in one run, on data of the paper's "
        f"shapes ({bench.images}). Machine: {machine['device']}, {machine['cores']} cores, torch {machine['torch']} "
        f"with {machine['threads']} threads; a large product runs at {bench.multiplication_rate / 1e9:.0f} GFLOP/s.\n",
        "## A round of FedAvg\n",
        "Five clients of 1713 samples, two epochs in minibatches of 50, an MLP 784-128-128-10, the server's step and a "
        "test of 1000 images included. The floor is what the whole matrix products alone take at the rate above; "
        f"our engine {_engine(machine)}. Simulators run in processes of their own, after the others, Flower's two "
        "strategies in turn in one run.\n",
        _table(
            ("", "ms a round (least to most)", "times our engine's"),
            (
                *((name, _ms(timed), f"{timed.median / engine:.1f}") for name, timed in bench.round.items()),
                ("floor", f"{1e3 * bench.floor:.0f}", f"{bench.floor / engine:.2f}"),
            ),
        ),
        *_strategy(bench),
        "## An outer step\n",
        "Ten rounds forward and backward for the gradient of the weights. *unrolled* is autograd through a graph "
        "over all rounds with detached local gradients, as the paper's code does it; it gives the same gradient as "
        "*first_order*.\n",
    ]
    for name, contenders in bench.outer_step.items():
        run = contenders["plain run"].median
        rows = [(who, _seconds(t), f"{t.median / run:.2f}") for who, t in contenders.items()]
        parts += [f"### {name}\n", _table(("", "s (least to most)", "times a plain run"), rows)]
    parts.append(_schedules(bench))
    memory = [(name, f"{held / 2**20:.0f}") for name, held in bench.memory.items()]
    parts += ["### Memory of one step, computation-skew\n", _table(("", "MiB"), memory)]
    parts += _scaling(bench.scaling, figure)
    starts = [(name, f"{timed.median:.2f}") for name, timed in bench.start_up.items()]
    parts += ["## Start-up\n", _table(("", "s"), starts)]
    return "\n".join(parts)


def _engine(machine: Mapping[str, Any]) -> str:
    if not machine["compiled_backend"]:
        return "was installed without a compiler, so that torch trains its clients"
    return "leaves out what is background in the images, so that without any it has more to do"


def _schedules(bench: Bench) -> str:
    """Whole weight-learning runs on the label-skewed federation, the paper's Env II, from the steps measured above."""
    steps, paper, fast = (
        bench.outer_step["label-skew"],
        environment("mnist-2").paper_schedule.iterations,
        Learning().iterations,
    )
    theirs, ours = paper * steps["unrolled"].median, fast * steps["first_order"].median
    return (
        f"The paper's schedule of {paper} steps by *unrolled* would take {theirs:.0f} s on *label-skew*, the fast one "
        f"of {fast} steps by *first_order* {ours:.0f} s: {theirs / ours:.0f} times less. What each reaches is in "
        "[Schedules](schedules.md).\n"
    )


def growth_figure(scaling: Scaling) -> Figure:
    """Seconds and memory of a step along every axis, with the slopes fitted to them."""
    picture = Figure(figsize=(11, 5), layout="constrained")
    grid: Any = picture.subplots(2, len(scaling.axes), sharey="row", squeeze=False)
    for column, axis in zip(grid.T, scaling.axes, strict=True):
        values = scaling.along(axis)
        for axes, of, unit, name in zip(column, ("seconds", "growth"), (1, 2**20), ("s", "MiB"), strict=True):
            measured = np.array([getattr(point, of) for point in scaling.axes[axis]]) / unit
            slope, offset = np.polyfit(np.log(values), np.log(measured), 1)
            axes.loglog(values, np.exp(offset) * np.array(values) ** slope, color="#999999", lw=1)
            axes.loglog(values, measured, color=COLOURS[0], marker=MARKERS[0], ms=5, lw=0)
            axes.set_title(f"slope {slope:.2f}", loc="left", fontsize=10)
            axes.set_xlabel(axis)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#dddddd", lw=0.6)
            if axis == next(iter(scaling.axes)):
                axes.set_ylabel(f"{name} of a step")
    return picture


def _scaling(scaling: Scaling, figure: str) -> list[str]:
    """How the cost grows, and the large federation."""
    rows = [
        (
            axis,
            f"{scaling.along(axis)[0]} to {scaling.along(axis)[-1]}",
            f"{points[0].seconds:.2f} to {points[-1].seconds:.2f}",
            f"{scaling.slope(axis):.2f}",
            f"{points[0].growth / 2**20:.0f} to {points[-1].growth / 2**20:.0f}",
        )
        for axis, points in scaling.axes.items()
    ]
    size, large = scaling.large.size, scaling.large
    stored = scaling.storages["full"].size
    storages = [
        (name, f"{point.growth / 2**20:.0f}", f"{point.seconds:.2f}", f"{point.error:.1e}" if point.error else "0")
        for name, point in scaling.storages.items()
    ]
    return [
        "## Growth\n",
        "One first-order outer step on federations of a linear head, each in a process of its own with one "
        "thread, one thing larger at a time. The slope is fitted on logarithmic axes: 1 where "
        "twice as much takes twice as long.\n",
        f"![Seconds and memory of a step against what grows]({figure})\n",
        _table(("", "range", "s", "slope", "MiB the step adds"), rows),
        f"{size.clients} clients of which {size.clients_per_round} train in a round, {size.rounds} rounds, "
        f"{size.parameters} parameters: {large.seconds:.1f} s a step, and a process of {large.peak / 2**30:.2f} GiB at "
        "most.\n",
        "### Where the updates of all rounds are stored\n",
        f"{stored.clients} clients, {stored.rounds} rounds, {stored.parameters} parameters; the error is that of the "
        "gradient of the weights, relative to that of full storage.\n",
        _table(("update storage", "MiB the step adds", "s", "error"), storages),
    ]


def _strategy(bench: Bench) -> list[str]:
    """What our strategy costs in the place of Flower's own, where both were measured."""
    try:
        theirs, ours = (bench.round[f"flower simulation, {name}"].median for name in ("FedAvg", "WeightedStrategy"))
    except KeyError:
        return []
    return [f"`WeightedStrategy` in the place of `FedAvg` changes a round by {100 * (ours / theirs - 1):+.1f} %.\n"]


def _ms(timed: Timed) -> str:
    return f"{1e3 * timed.median:.0f} ({1e3 * timed.least:.0f} to {1e3 * timed.most:.0f})"


def _seconds(timed: Timed) -> str:
    return f"{timed.median:.2f} ({timed.least:.2f} to {timed.most:.2f})"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

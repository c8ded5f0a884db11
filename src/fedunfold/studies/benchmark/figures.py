"""The critical-difference diagram, and the curves of all methods."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.plotting import COLOURS, line_style
from fedunfold.studies.benchmark.summary import Kind, Summary

BAR_STEP = 0.22
DASHES = ("-", "--", ":")


def cliques(ranks: Mapping[str, float], difference: float) -> list[tuple[float, float]]:
    """Ranges of mean ranks no further apart than the critical difference, each as wide as it can be; only those with
    several methods.

    >>> cliques({"a": 1.0, "b": 1.8, "c": 2.5, "d": 4.0}, 1.0)
    [(1.0, 1.8), (1.8, 2.5)]
    """
    ordered = sorted(ranks.values())
    found: list[tuple[float, float]] = []
    for first in ordered:
        last = max(rank for rank in ordered if rank <= first + difference)
        if last > first and not any(low <= first and last <= high for low, high in found):
            found.append((first, last))
    return found


def critical_difference_diagram(ranking: Mapping[str, Any], title: str) -> Figure:
    """Mean ranks on a line, the best on the left; a bar joins methods between which there is no significant difference.

    Args:
        ranking: What `Summary.ranking` found.
        title: Of the diagram.

    Reference: Demšar 2006.
    """
    ranks: Mapping[str, float] = ranking["mean_ranks"]
    ordered = sorted(ranks, key=lambda method: (ranks[method], method))
    bars = cliques(ranks, ranking["critical_difference"])
    half = (len(ordered) + 1) // 2
    depth = 0.5 + BAR_STEP * len(bars)
    figure = Figure(figsize=(9, 1.5 + 0.28 * half + 0.16 * len(bars)), layout="constrained")
    axes: Axes = figure.add_subplot()
    axes.set_axis_off()
    most = len(ordered)
    axes.set_xlim(1 - 0.45 * most, most + 0.45 * most)
    axes.set_ylim(-depth - 0.5 * half - 0.1, 1.5)
    axes.plot([1, most], [0, 0], color="black", lw=1.2)
    for tick in range(1, most + 1):
        axes.plot([tick, tick], [0, 0.12], color="black", lw=1)
        axes.text(tick, 0.2, str(tick), ha="center", va="bottom", fontsize=8)
    shown = min(ranking["critical_difference"], most - 1.0)
    longer = "" if shown == ranking["critical_difference"] else ", more than there is room for"
    axes.plot([1, 1 + shown], [0.95, 0.95], color="black", lw=1.5, marker="|", ms=8)
    label = f"critical difference {ranking['critical_difference']:.2f}{longer}"
    axes.text(1 + shown / 2, 1.05, label, ha="center", va="bottom", fontsize=8)
    for i, (low, high) in enumerate(bars):
        axes.plot([low, high], [-0.3 - BAR_STEP * i] * 2, color="#555555", lw=4, solid_capstyle="round")
    for place, method in enumerate(ordered):
        left = place < half
        height = -depth - 0.5 * (place if left else most - 1 - place)
        end = 1 - 0.05 * most if left else most + 0.05 * most
        axes.plot([ranks[method], ranks[method], end], [0, height, height], color="#777777", lw=0.8)
        text = f"{method}  {ranks[method]:.2f}" if left else f"{ranks[method]:.2f}  {method}"
        axes.text(end, height, f" {text} ", ha="right" if left else "left", va="center", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    return figure


def curves(summary: Summary, kind: Kind) -> Figure:
    """The mean score after every round in each environment.

    Args:
        summary: What was found.
        kind: Under which settings.
    """
    names = summary.environments
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(
        figsize=(4.2 * columns, 3.2 * rows + 0.25 * -(-len(summary.methods) // (2 * columns))), layout="constrained"
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        primary = summary.primary(name)
        for index, method in enumerate(summary.methods):
            cell = summary.cell(kind, name, method)
            if cell is not None and cell.curve:
                style = line_style(index, len(cell.curve)) | {"ls": DASHES[index // len(COLOURS) % len(DASHES)]}
                axes.plot(range(1, len(cell.curve) + 1), cell.curve, label=method, **style)
        axes.set_title(f"{name}: {primary.label}{primary.brackets()}", loc="left", fontsize=9)
        axes.set_xlabel("round")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    order = [method for method in summary.methods if method in lines]
    figure.legend(
        [lines[m] for m in order], order, loc="outside lower center", ncols=2 * columns, frameon=False, fontsize=8
    )
    return figure

"""Figures of a comparison and of learned weights. Each function returns a matplotlib `Figure`."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.io.atomic import write_atomically
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.comparison import Comparison

# Okabe and Ito's palette: distinct also for readers who see colours differently; black last.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
LEGEND_LIMIT = 12
FAINT: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.25, "lw": 1}


class ShownFigure(Figure):
    """A figure that a notebook shows as it is; matplotlib's own is only shown by way of pyplot."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=90)
        return content.getvalue()


def scores(comparison: Comparison) -> Figure:
    """The test's primary metric after every round: the mean of the trials, shaded by one standard deviation.

    Args:
        comparison: What was compared; a trial that stopped early stays at its last score.

    Raises:
        InputError: It is something else.
    """
    _check(comparison, Comparison)
    primary = comparison.primary
    figure, axes = _canvas(f"{comparison.environment}: test {primary.label}, {_trials(comparison)}")
    for i, result in enumerate(comparison.methods):
        label = f"{result.name}  {primary.text(result.mean)}"
        draw_curves(axes, primary.factor() * np.array(result.curves), i, label)
    axes.set(xlabel="round", ylabel=f"{primary.label} on the test set{primary.brackets()}{primary.direction}")
    axes.legend(frameon=False, title="method, last round")
    return figure


def scores_over_time(comparison: Comparison) -> Figure:
    """The test's primary metric over simulated time: the mean of the trials, each at its last score until its next.

    Args:
        comparison: What was compared, in an environment with a clock; methods without time are left out.

    Raises:
        InputError: It is something else, or no method has time.
    """
    _check(comparison, Comparison)
    if not comparison.has_times:
        raise InputError("no method of this comparison has simulated time; give its environment a clock.")
    primary = comparison.primary
    figure, axes = _canvas(f"{comparison.environment}: test {primary.label} over time, {_trials(comparison)}")
    for i, result in enumerate(comparison.methods):
        timed = [trial for trial in result.trials if trial.times]
        if not timed:
            continue
        # From where every trial has a score to where the first of them ends.
        begin, end = max(trial.times[0] for trial in timed), min(trial.times[-1] for trial in timed)
        grid = np.linspace(begin, max(begin, end), 200)
        values = np.array([_at(trial, grid) for trial in timed])
        draw_curves(axes, primary.factor() * values, i, result.name, grid)
    axes.set(
        xlabel="simulated seconds", ylabel=f"{primary.label} on the test set{primary.brackets()}{primary.direction}"
    )
    axes.legend(frameon=False, title="method")
    return figure


def _at(trial: RunResult, times: np.ndarray) -> np.ndarray:
    """The score of the model that there is at some times."""
    known: np.ndarray = np.array(trial.scores)[np.searchsorted(trial.times, times, side="right").clip(1) - 1]
    return known


def weights(learned: LearnedWeights) -> Figure:
    """Θ over the rounds, a line for each client; dotted, where it started.

    Args:
        learned: The weights; a federation of more than 12 clients gets no legend.

    Raises:
        InputError: They are something else.
    """
    _check(learned, LearnedWeights)
    values, start = learned.weights.numpy(), learned.history[0].numpy()
    figure, axes = _canvas("Learned weights: how much each client counts in each round")
    rounds = np.arange(1, len(values) + 1)
    many = len(learned.client_ids) > LEGEND_LIMIT
    for k, key in enumerate(learned.client_ids):
        style = FAINT if many else line_style(k, len(rounds))
        axes.plot(rounds, values[:, k], label=key, **style)
        if not many:
            axes.axhline(start[0, k], color=COLOURS[k % len(COLOURS)], ls=":", lw=1, alpha=0.7)
    axes.set(xlabel="round", ylabel="weight Θ")
    axes.set_ylim(bottom=0)
    if not many:
        axes.legend(frameon=False, title="client (dotted: by size)", ncols=2)
    return figure


def outer_loss(learned: LearnedWeights) -> Figure:
    """The outer loss that the weights were learned for, at every iteration.

    Args:
        learned: The weights.

    Raises:
        InputError: They are something else.
    """
    _check(learned, LearnedWeights)
    figure, axes = _canvas("Outer loss while learning")
    losses = learned.losses.numpy()
    axes.plot(np.arange(len(losses)), losses, **line_style(0, len(losses)))
    axes.set(xlabel="outer iteration", ylabel="outer loss")
    return figure


def draw_curves(axes: Axes, values: np.ndarray, index: int, label: str, at: np.ndarray | None = None) -> None:
    """Draw the mean of the trials over the rounds, or at other places, shaded by one standard deviation.

    Args:
        axes: Where to.
        values: [trials, rounds].
        index: The line's number, for colour and marker.
        label: Its name in the legend.
        at: Where on the horizontal axis; by default at the rounds from 1.
    """
    mean = values.mean(0)
    at = np.arange(1, values.shape[1] + 1) if at is None else at
    axes.plot(at, mean, label=label, **line_style(index, len(at)))
    if len(values) > 1:
        sd = values.std(0, ddof=1)
        axes.fill_between(at, mean - sd, mean + sd, color=COLOURS[index % len(COLOURS)], alpha=0.15, lw=0)


def line_style(index: int, points: int) -> dict[str, Any]:
    """Colour and marker together, so that lines differ without colour too; few markers on long lines.

    Args:
        index: The line's number.
        points: How many points it has.
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": max(1, points // 12),
        "ms": 4.5,
        "lw": 1.6,
    }


def save(figure: Figure, path: str | Path, dpi: int = 150) -> None:
    """Write a figure whole or not at all.

    Args:
        figure: The figure.
        path: The file; the ending of its name says the format, .png where there is none.
        dpi: Dots per inch, where the format has some.

    Raises:
        InputError: There is no such format.
        WriteError: The file cannot be written.
    """
    path = Path(path)
    path = path if path.suffix else path.with_suffix(".png")
    formats = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise InputError(f"cannot write {path}: '{path.suffix}' is no format of figures; use .{', .'.join(formats)}.")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=dpi))


def _check(given: object, drawn: type) -> None:
    if not isinstance(given, drawn):
        raise InputError(f"this figure shows a {drawn.__name__}, not a {type(given).__name__}.")


def _canvas(title: str) -> tuple[Figure, Axes]:
    figure = ShownFigure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _trials(comparison: Comparison) -> str:
    """How many there were; methods have different numbers where a comparison was stopped."""
    counts = sorted({len(result.trials) for result in comparison.methods})
    if counts == [1]:
        return "1 trial"
    return f"mean ± sd of {' to '.join(map(str, (counts[0], counts[-1])[: len(counts)]))} trials"

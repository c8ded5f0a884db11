"""The figures of a study."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.config import Environment
from fedunfold.plotting import COLOURS, draw_curves, line_style
from fedunfold.studies.records import CaseRecords, curves
from fedunfold.studies.tables import rate_fit, rate_points

SHOWN = ("fedavg", "dr-fedavg", "duw-fedavg", "fednova-remember", "fedunfold-table")


def composite(studied: Sequence[CaseRecords]) -> Figure:
    """For every environment: who holds what, test accuracy per round, learned weights per round."""
    figure = Figure(figsize=(13, 3.1 * len(studied)), layout="constrained")
    rows = figure.subplots(len(studied), 3, squeeze=False)
    for seen, (data, accuracy, weights) in zip(studied, rows, strict=True):
        _draw_data(data, seen.case.env)
        _draw_accuracies(accuracy, seen)
        _draw_weights(weights, seen)
        for axes, title in ((data, "data"), (accuracy, "test accuracy (%)"), (weights, "learned weights (DUW)")):
            axes.set_title(f"{seen.case.name}: {title}", loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def rate(seen: CaseRecords) -> Figure:
    """Mean variance of the weights over the rounds, against 1/√T, on logarithmic axes."""
    rounds, variances = rate_points(seen)
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog(rounds, variances, "o", color=COLOURS[0], label="mean variance of Θ over the rounds")
    peak = int(np.argmax(variances))
    if len(rounds) - peak > 1:
        slope, intercept = rate_fit(rounds[peak:], variances[peak:])
        falling = np.array([rounds[peak], rounds[-1]], dtype=float)
        label = f"fit from T = {rounds[peak]} on, slope {slope:.2f}"
        axes.loglog(falling, math.e**intercept * falling**slope, "-", color=COLOURS[0], label=label)
    line = np.array([rounds[0], rounds[-1]], dtype=float)
    axes.loglog(line, line**-0.5, "--", color=COLOURS[1], label="1/√T")
    axes.set(xlabel="rounds T", ylabel="variance")
    axes.set_xticks(rounds, [str(t) for t in rounds])
    axes.minorticks_off()
    axes.set_title("Variance of learned weights", loc="left", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_data(axes: Axes, env: Environment) -> None:
    """Samples of every client, stacked by class."""
    data = env.load()
    counts = data.label_counts.numpy()
    bottom = np.zeros(len(data.keys))
    shades = np.linspace(0.25, 1.0, counts.shape[1])
    few = counts.shape[1] <= 10
    for label in range(counts.shape[1]):
        colour = COLOURS[label % len(COLOURS)]
        name = str(label) if few else None
        axes.bar(data.keys, counts[:, label], bottom=bottom, color=colour, alpha=float(shades[label]), label=name)
        bottom += counts[:, label]
    axes.set_ylabel("samples")
    if few:
        axes.set_ylim(top=1.35 * bottom.max())
        axes.legend(frameon=False, fontsize=7, ncols=5, title="label", title_fontsize=7, loc="upper center")


def _draw_accuracies(axes: Axes, seen: CaseRecords) -> None:
    for i, row in enumerate(row for row in seen.rows if row.name in SHOWN):
        if trials := seen.trials(row.name):
            draw_curves(axes, curves(trials), i, row.title or row.name)
    axes.set_xlabel("round")
    axes.legend(frameon=False, fontsize=8)


def _draw_weights(axes: Axes, seen: CaseRecords) -> None:
    weights = seen.weights("duw-fedavg")
    if weights is None:
        return
    rounds = np.arange(1, len(weights) + 1)
    for k, client in enumerate(seen.case.env.clients):
        axes.plot(rounds, weights[:, k], label=client.key, **line_style(k, len(rounds)))
    axes.set(xlabel="round", ylabel="Θ")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)

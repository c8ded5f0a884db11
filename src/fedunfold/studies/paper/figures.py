"""The figures of a study."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.config import Environment
from fedunfold.plotting import COLOURS, MARKERS
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies.paper.tables import rate_fit, rate_points
from fedunfold.studies.reproduction import Records, StudyCase, StudyRow

SHOWN = ("fedavg", "dr-fedavg", "duw-fedavg", "fednova-remember", "fedunfold")


def composite(studied: Sequence[tuple[StudyCase, Sequence[StudyRow]]], records: Records) -> Figure:
    """For every environment: who holds what, test accuracy per round, learned weights per round."""
    figure = Figure(figsize=(13, 3.1 * len(studied)), layout="constrained")
    rows = figure.subplots(len(studied), 3, squeeze=False)
    for (case, entries), (data, accuracy, weights) in zip(studied, rows, strict=True):
        _distribution(data, case.env)
        _accuracies(accuracy, case, entries, records)
        learned = records.weights(case, "duw-fedavg")
        if learned is not None:
            _weights(weights, learned)
        for axes, title in ((data, "data"), (accuracy, "test accuracy (%)"), (weights, "learned weights (DUW)")):
            axes.set_title(f"{case.name}: {title}", loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def rate(case: StudyCase, records: Records) -> Figure:
    """Mean variance of the weights over the rounds, against 1/√T, on logarithmic axes."""
    rounds, variances = rate_points(case, records)
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


def _distribution(axes: Axes, env: Environment) -> None:
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


def _accuracies(axes: Axes, case: StudyCase, entries: Sequence[StudyRow], records: Records) -> None:
    shown = [entry for entry in entries if entry.name in SHOWN]
    for i, entry in enumerate(shown):
        trials = records.trials(case, entry.name, entry.trials)
        if not trials:
            continue
        values = 100 * np.array([trial["accuracies"] for trial in trials])
        rounds = np.arange(1, values.shape[1] + 1)
        every = max(1, len(rounds) // 10)
        label = entry.title or entry.name
        axes.plot(rounds, values.mean(0), color=COLOURS[i], marker=MARKERS[i], ms=4, markevery=every, label=label)
        if len(values) > 1:
            low, high = values.mean(0) - values.std(0, ddof=1), values.mean(0) + values.std(0, ddof=1)
            axes.fill_between(rounds, low, high, color=COLOURS[i], alpha=0.15, lw=0)
    axes.set_xlabel("round")
    axes.legend(frameon=False, fontsize=8)


def _weights(axes: Axes, learned: LearnedWeights) -> None:
    rounds = np.arange(1, len(learned.weights) + 1)
    for k, key in enumerate(learned.keys):
        axes.plot(
            rounds,
            learned.weights[:, k].numpy(),
            color=COLOURS[k % len(COLOURS)],
            marker=MARKERS[k % len(MARKERS)],
            ms=4,
            markevery=max(1, len(rounds) // 10),
            label=key,
        )
    axes.set(xlabel="round", ylabel="Θ")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)

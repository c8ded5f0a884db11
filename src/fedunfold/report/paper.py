"""The paper's figures and tables, made from the records of a reproduction and from nothing else."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.environments import Environment
from fedunfold.experiments.reproduction import LEARNED, PLAIN, RATE_ROUNDS, Records, Setting, Study
from fedunfold.experiments.theory import weight_variances
from fedunfold.files import write_atomically
from fedunfold.report.figures import COLOURS, MARKERS, save
from fedunfold.weighting.learned import LearnedWeights

# Nakai-Kasai and Wadayama: Stanford Dogs, ViT-B/16 features, mean ± standard deviation of 10 trials.
PUBLISHED_DOGS = {
    "dogs-a": {
        "fedavg": (81.63, 2.24),
        "fednova": (76.93, 2.89),
        "dr-fedavg": (87.22, 0.30),
        "fedadp": (78.67, 2.26),
        "fedfa": (77.92, 2.58),
        "duw-fedavg": (88.15, 0.63),
        "duw-fednova": (85.73, 1.97),
    },
    "dogs-b": {
        "fedavg": (58.32, 2.62),
        "fednova": (71.00, 5.34),
        "dr-fedavg": (61.37, 1.22),
        "fedadp": (61.45, 11.61),
        "fedfa": (60.56, 15.24),
        "duw-fedavg": (62.51, 0.48),
        "duw-fednova": (60.34, 1.68),
    },
}
# Read off the text and figures of the same paper.
PUBLISHED_MNIST = {
    "mnist-1": "about equal",
    "mnist-2": "DUW 75, FedAvg and DR at most 55",
    "mnist-3": "DUW above FedAvg and DR at every round",
    "mnist-4": "DUW above FedAvg and DR at every round",
}
EXTRA = {
    "duw-fedavg-reused": "duw-fedavg, the same weights under another seed",
    "fedavg-budget": "fedavg with the rounds that learning took",
}
FIGURE_METHODS = ("fedavg", "dr-fedavg", "duw-fedavg")
BYTES_PER_NUMBER = 4


def composite(envs: Sequence[Environment], records: Records) -> Figure:
    """For every environment: who holds what, test accuracy per round, learned weights per round."""
    figure = Figure(figsize=(13, 3.1 * len(envs)), layout="constrained")
    rows = figure.subplots(len(envs), 3, squeeze=False)
    for env, (data, accuracy, weights) in zip(envs, rows, strict=True):
        _distribution(data, env)
        _accuracies(accuracy, env, records)
        learned = records.weights(env.name, "duw-fedavg")
        if learned is not None:
            _weights(weights, learned)
        for axes, title in ((data, "data"), (accuracy, "test accuracy (%)"), (weights, "learned weights")):
            axes.set_title(f"{env.name}: {title}", loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def rate(records: Records, env: str) -> Figure:
    """Mean variance of the weights over the rounds, against 1/√T, on logarithmic axes."""
    rounds, variances = rate_points(records, env)
    slope, intercept = rate_fit(rounds, variances)
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog(rounds, variances, "o", color=COLOURS[0], label="mean variance of Θ over the rounds")
    line = np.array([rounds[0], rounds[-1]], dtype=float)
    axes.loglog(line, math.e**intercept * line**slope, "-", color=COLOURS[0], label=f"fit, slope {slope:.2f}")
    axes.loglog(line, line**-0.5, "--", color=COLOURS[1], label="1/√T")
    axes.set(xlabel="rounds T", ylabel="variance")
    axes.set_title("Variance of learned weights", loc="left", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rate_points(records: Records, env: str) -> tuple[list[int], list[float]]:
    """(T, mean_k V_k) for every T that was learned."""
    points = []
    for rounds in RATE_ROUNDS:
        learned = records.weights(env, f"rounds-{rounds}")
        if learned is not None:
            points.append((rounds, float(weight_variances(learned.weights.numpy()).mean())))
    return [rounds for rounds, _ in points], [variance for _, variance in points]


def rate_fit(rounds: Sequence[int], variances: Sequence[float]) -> tuple[float, float]:
    """Least squares of log V on log T: (slope, intercept)."""
    slope, intercept = np.polyfit(np.log(rounds), np.log(variances), 1)
    return float(slope), float(intercept)


def comparison_markdown(env: Environment, setting: Setting, records: Records) -> str:
    """One environment's table: ours beside the published figures, and what each method costs."""
    lines = [
        f"### {env.name}",
        "",
        env.description,
        "",
        "| method | accuracy (%) | published | rounds | client steps | sent (MB) |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*PLAIN, *LEARNED, *EXTRA):
        trials = records.trials(env.name, name)
        if not trials:
            continue
        rounds, steps, megabytes = price(env, setting, name, trials)
        published = PUBLISHED_DOGS.get(env.name, {}).get(name)
        shown = f"{published[0]:.2f} ± {published[1]:.2f}" if published else ""
        lines.append(
            f"| {EXTRA.get(name, name)} | {spread(finals(trials))} | {shown} | {rounds:,.0f} | {steps:,.0f} "
            f"| {megabytes:,.1f} |"
        )
    if env.name in PUBLISHED_MNIST:
        lines += ["", f"Published: {PUBLISHED_MNIST[env.name]}."]
    return "\n".join(lines) + "\n"


def price(
    env: Environment, setting: Setting, name: str, trials: Sequence[dict[str, Any]]
) -> tuple[float, float, float]:
    """(rounds, client steps, megabytes sent) of one run, learning included.

    A present client receives and sends one model a round. An outer iteration adds the last layer: every client
    receives w^(T), passes once over its data, and sends a gradient. The exact adjoint walks every round once
    more: a present client receives w^(t) and an adjoint, sends an adjoint, and makes three steps' work of one
    (the replay, and a Hessian-vector product worth two).
    """
    mean = {key: statistics.fmean(t[key] for t in trials) for key in ("rounds", "client_steps", "participations")}
    data = env.load()
    dimension = (math.prod(data.x.shape[1:]), *env.model.hidden, data.classes)
    numbers = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(dimension))
    rounds, steps, sent = mean["rounds"], mean["client_steps"], 2 * mean["participations"]
    base = name.removesuffix("-reused")
    if base in LEARNED:
        exact = LEARNED[base][1] == "exact"
        iterations = setting.learning(env, LEARNED[base][1]).iterations
        last_layer = sum(-(-size // env.batch_size) for size in data.sizes)
        rounds += iterations * mean["rounds"] * (2 if exact else 1)
        steps += iterations * (mean["client_steps"] * (4 if exact else 1) + last_layer)
        sent += iterations * (mean["participations"] * (5 if exact else 2) + 2 * len(data.sizes))
    return rounds, steps, sent * numbers * BYTES_PER_NUMBER / 1e6


def finals(trials: Iterable[dict[str, Any]]) -> list[float]:
    """Accuracy after the last round of every trial, in percent."""
    return [100 * trial["accuracies"][-1] for trial in trials]


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n − 1)."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} ± {sd:.2f}"


def rate_markdown(records: Records, env: str) -> str:
    """The variances beside 1/√T, and the fitted slope."""
    rounds, variances = rate_points(records, env)
    lines = ["### Variance of the learned weights", "", "| T | mean variance | 1/√T |", "|---|---|---|"]
    lines += [f"| {t} | {v:.5f} | {t**-0.5:.5f} |" for t, v in zip(rounds, variances, strict=True)]
    if len(rounds) > 1:
        lines += ["", f"Fitted slope on logarithmic axes: {rate_fit(rounds, variances)[0]:.2f}."]
    return "\n".join(lines) + "\n"


def write_results(
    out: Path,
    command: str,
    setting: Setting,
    studies: Mapping[Study, Sequence[Environment]],
    records: Records,
) -> Path:
    """Figures and results.md of the studies, into `out`."""
    parts = []
    for study, envs in studies.items():
        if study == "rate":
            save(rate(records, envs[0].name), out / "rate.png")
            parts += [
                "![Variance of the weights against rounds](rate.png)\n",
                rate_markdown(records, envs[0].name),
            ]
            continue
        save(composite(envs, records), out / f"{study}.png")
        parts.append(f"![Data, accuracy and learned weights]({study}.png)\n")
        parts += [comparison_markdown(env, setting, records) for env in envs]
    file = out / "results.md"
    text = results_markdown(command, setting, parts)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return file


def results_markdown(command: str, setting: Setting, parts: Iterable[str]) -> str:
    """results.md: how it was made, then the tables."""
    head = (
        "# The paper's experiments, reproduced\n\n"
        f"`{command}`, seed {setting.seed}, device {setting.device}, {setting.trials} trials (mean ± standard "
        f"deviation); outer schedule `{setting.schedule}`.\n\n"
        "Published figures: A. Nakai-Kasai and T. Wadayama, deep unfolding-based weighted averaging; their dogs "
        "figures are for ViT-B/16 features, ours for the features named in the environment, so compare methods, "
        "not columns. Rounds, client steps and megabytes count the learning of the weights too; weights are "
        "learned once and used in all trials, each with its own initial model, minibatches and absences.\n"
    )
    return "\n".join([head, *parts])


def _distribution(axes: Axes, env: Environment) -> None:
    """Samples of every client, stacked by class."""
    data = env.load()
    counts = data.label_counts.numpy()
    bottom = np.zeros(len(data.keys))
    shades = np.linspace(0.25, 1.0, counts.shape[1])
    for label in range(counts.shape[1]):
        colour = COLOURS[label % len(COLOURS)]
        name = str(label) if counts.shape[1] <= 10 else None
        axes.bar(data.keys, counts[:, label], bottom=bottom, color=colour, alpha=float(shades[label]), label=name)
        bottom += counts[:, label]
    axes.set_ylabel("samples")
    if counts.shape[1] <= 10:
        axes.legend(frameon=False, fontsize=7, ncols=2, title="label", title_fontsize=7)


def _accuracies(axes: Axes, env: Environment, records: Records) -> None:
    for i, name in enumerate(FIGURE_METHODS):
        trials = records.trials(env.name, name)
        if not trials:
            continue
        values = 100 * np.array([trial["accuracies"] for trial in trials])
        rounds = np.arange(1, values.shape[1] + 1)
        every = max(1, len(rounds) // 10)
        axes.plot(rounds, values.mean(0), color=COLOURS[i], marker=MARKERS[i], ms=4, markevery=every, label=name)
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

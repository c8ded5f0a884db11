"""The tables of a study: ours beside the published figures, and what each method costs."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedunfold.core.task import OuterLoss
from fedunfold.studies.reproduction import RATE_ROUNDS, Records, StudyCase, StudyRow
from fedunfold.studies.theory import weight_variances

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
MILESTONES = dict.fromkeys(("dogs-a", "dogs-b", "dogs-a-held-out", "dogs-b-held-out"), (75, 80, 82))
"""Accuracies, in percent, whose first round is shown."""
BYTES_PER_NUMBER = 4


def comparison(case: StudyCase, entries: Sequence[StudyRow], records: Records) -> str:
    """One environment's table: accuracy, published accuracy, rounds to the milestones, price."""
    milestones, published = MILESTONES.get(case.name, ()), PUBLISHED_DOGS.get(case.name, {})
    heads = ["method", "trials", "accuracy (%)", *(["published"] if published else [])]
    heads += [*(f"rounds to {m} %" for m in milestones), *(["largest fall"] if case.held_out else [])]
    heads += ["rounds", "client steps", "sent (MB)"]
    lines = [f"### {case.name}", "", case.env.description, "", row(heads), row(["---"] * len(heads))]
    for entry in entries:
        trials = records.trials(case, entry.name, entry.trials)
        if not trials:
            continue
        rounds, steps, megabytes = price(case, entry, trials)
        theirs = published.get(entry.name)
        cells = [
            entry.title or entry.name,
            str(len(trials)),
            spread(finals(trials, balanced=bool(case.held_out))),
            *([f"{theirs[0]:.2f} ± {theirs[1]:.2f}" if theirs else ""] if published else []),
            *(str(rounds_to(trials, m) or "never") for m in milestones),
            *([f"{largest_fall(trials):.1f}"] if case.held_out else []),
            f"{rounds:,.0f}",
            f"{steps:,.0f}",
            f"{megabytes:,.1f}",
        ]
        lines.append(row(cells))
    if case.name in PUBLISHED_MNIST:
        lines += ["", f"Published: {PUBLISHED_MNIST[case.name]}."]
    return "\n".join(lines) + "\n"


def price(case: StudyCase, entry: StudyRow, trials: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """(rounds, client steps, megabytes sent) of one run, the learning of its weights included.

    A present client receives and sends one model a round. An outer iteration adds the last layer: every client
    receives w^(T), passes once over its data, and sends a gradient. Unless the outer loss is one of the last
    layer alone, an absent client does the same with w^(t), and with the first-order adjoint a present one also
    sends its outer gradient, where that is not read off its model (balanced, mse, prox). The exact adjoint walks
    every round once more: a present client receives w^(t) and an adjoint, sends an adjoint, and makes three
    steps' work of one (the replay, and a Hessian-vector product worth two).
    """
    mean = {key: statistics.fmean(t[key] for t in trials) for key in ("rounds", "client_steps", "participations")}
    env, data = case.env, case.load()
    dimension = (math.prod(data.x.shape[1:]), *env.model.hidden, data.classes)
    numbers = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(dimension))
    rounds, steps, sent = mean["rounds"], mean["client_steps"], 2 * mean["participations"]
    if entry.learning is not None:
        outer, exact = OuterLoss(entry.learning.outer), entry.learning.adjoint == "exact"
        runs = entry.learning.iterations * entry.learning.num_samples
        last_layer = sum(-(-size // env.batch_size) for size in data.sizes)
        if not outer.only_last_layer:
            absences = mean["rounds"] * len(data.sizes) - mean["participations"]
            steps += runs * absences * last_layer / len(data.sizes)
            carried = exact or (outer.is_training_gradient and not entry.method.algorithm.update.mu)
            sent += runs * (2 * absences + (0 if carried else mean["participations"]))
        rounds += runs * mean["rounds"] * (2 if exact else 1)
        steps += runs * (mean["client_steps"] * (4 if exact else 1) + last_layer)
        sent += runs * (mean["participations"] * (5 if exact else 2) + 2 * len(data.sizes))
    return rounds, steps, sent * numbers * BYTES_PER_NUMBER / 1e6


def finals(trials: Iterable[dict[str, Any]], balanced: bool = False) -> list[float]:
    """Accuracy after the last round of every trial, in percent; `balanced` is the mean over the classes."""
    if balanced:
        return [100 * float(np.nanmean(trial["class_accuracy"])) for trial in trials]
    return [100 * trial["accuracies"][-1] for trial in trials]


def largest_fall(trials: Sequence[dict[str, Any]]) -> float:
    """How far the mean accuracy of the trials falls below its best so far, in points."""
    mean = 100 * np.mean([trial["accuracies"] for trial in trials], axis=0)
    return float((np.maximum.accumulate(mean) - mean).max())


def rounds_to(trials: Iterable[dict[str, Any]], percent: float) -> int | None:
    """The first round, from 1, after which the mean accuracy of the trials reaches it."""
    mean = 100 * np.mean([trial["accuracies"] for trial in trials], axis=0)
    reached = np.flatnonzero(mean >= percent)
    return int(reached[0]) + 1 if len(reached) else None


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n − 1); the value alone where there is one."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def rate_points(case: StudyCase, records: Records) -> tuple[list[int], list[float]]:
    """(T, mean_k V_k) for every T that was learned."""
    points = []
    for rounds in RATE_ROUNDS:
        learned = records.weights(case, f"rounds-{rounds}")
        if learned is not None:
            points.append((rounds, float(weight_variances(learned.weights.numpy()).mean())))
    return [rounds for rounds, _ in points], [variance for _, variance in points]


def rate_fit(rounds: Sequence[int], variances: Sequence[float]) -> tuple[float, float]:
    """Least squares of log V on log T: (slope, intercept)."""
    slope, intercept = np.polyfit(np.log(rounds), np.log(variances), 1)
    return float(slope), float(intercept)


def slopes(rounds: Sequence[int], variances: Sequence[float]) -> str:
    """The slope over all T, and where the variance first rises, the one from its peak on."""
    text = f"{rate_fit(rounds, variances)[0]:.2f} over all T"
    peak = int(np.argmax(variances))
    if 0 < peak < len(rounds) - 1:
        text += f", {rate_fit(rounds[peak:], variances[peak:])[0]:.2f} from the peak at T = {rounds[peak]} on"
    return text


def rate(case: StudyCase, records: Records) -> str:
    """The variances beside 1/√T, and the fitted slope."""
    rounds, variances = rate_points(case, records)
    lines = ["### Variance of the learned weights", "", row(["T", "mean variance", "1/√T"]), row(["---"] * 3)]
    lines += [row([str(t), f"{v:.5f}", f"{t**-0.5:.5f}"]) for t, v in zip(rounds, variances, strict=True)]
    if len(rounds) > 1:
        lines += ["", f"Fitted slope on logarithmic axes: {slopes(rounds, variances)}."]
    return "\n".join(lines) + "\n"


def row(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"

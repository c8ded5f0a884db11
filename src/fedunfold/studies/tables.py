"""The tables of a study: ours beside the published figures, and what each method costs."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources

import numpy as np

from fedunfold.studies.cases import StudyCase
from fedunfold.studies.costs import Costs, learning_costs
from fedunfold.studies.records import CaseRecords, Trial, curves
from fedunfold.studies.rows import RATE_ROUNDS, StudyRow
from fedunfold.studies.theory.formulas import weight_variances

# Nakai-Kasai and Wadayama: Stanford Dogs, ViT-B/16 features, mean ± standard deviation of 10 trials.
PUBLISHED_DOGS = {
    "dogs-a": {
        "fedavg": "81.63 ± 2.24",
        "fednova": "76.93 ± 2.89",
        "dr-fedavg": "87.22 ± 0.30",
        "fedadp": "78.67 ± 2.26",
        "fedfa": "77.92 ± 2.58",
        "duw-fedavg": "88.15 ± 0.63",
        "duw-fednova": "85.73 ± 1.97",
    },
    "dogs-b": {
        "fedavg": "58.32 ± 2.62",
        "fednova": "71.00 ± 5.34",
        "dr-fedavg": "61.37 ± 1.22",
        "fedadp": "61.45 ± 11.61",
        "fedfa": "60.56 ± 15.24",
        "duw-fedavg": "62.51 ± 0.48",
        "duw-fednova": "60.34 ± 1.68",
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


def comparison(seen: CaseRecords) -> str:
    """One environment's table: accuracy, published accuracy, rounds to the milestones, price."""
    case = seen.case
    milestones, published = MILESTONES.get(case.name, ()), PUBLISHED_DOGS.get(case.name, {})
    shown = [(row, trials) for row in seen.rows if (trials := seen.trials(row.name))]
    columns = {
        "method": [row.title or row.name for row, _ in shown],
        "trials": [str(len(trials)) for _, trials in shown],
        "accuracy (%)": [spread(seen.finals(row.name)) for row, _ in shown],
    }
    if published:
        columns["published"] = [published.get(row.name, "") for row, _ in shown]
    for percent in milestones:
        columns[f"rounds to {percent} %"] = [str(rounds_to(trials, percent) or "never") for _, trials in shown]
    if case.held_out:
        columns["largest fall"] = [f"{largest_fall(trials):.1f}" for _, trials in shown]
    prices = [price(case, row, trials) for row, trials in shown]
    for i, (head, digits) in enumerate({"rounds": 0, "client steps": 0, "sent (MB)": 1}.items()):
        columns[head] = [f"{paid[i]:,.{digits}f}" for paid in prices]
    table = markdown(list(columns), zip(*columns.values(), strict=True))
    text = f"### {case.name}\n\n{case.env.description}\n\n{table}"
    return text + (f"\nPublished: {PUBLISHED_MNIST[case.name]}.\n" if case.name in PUBLISHED_MNIST else "")


def price(case: StudyCase, row: StudyRow, trials: Sequence[Trial]) -> tuple[float, float, float]:
    """(rounds, client steps, megabytes sent) of one run, including those of learning its weights (`learning_costs`).

    A participating client receives and sends one model a round.

    Args:
        case: What it was run on.
        row: What was run.
        trials: Its records, of which the mean counts.
    """
    mean = {key: statistics.fmean(t[key] for t in trials) for key in ("rounds", "client_steps", "participations")}
    env, data = case.env, case.load()
    dimension = (math.prod(data.x.shape[1:]), *env.model.hidden, data.classes)
    numbers = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(dimension))
    run = Costs(mean["rounds"], mean["client_steps"], mean["participations"], 2 * mean["participations"])
    before = Costs(0, 0, 0, 0)
    if row.learning is not None:
        before = learning_costs(env, data.sizes, row.method.algorithm, row.learning, run)
    return (
        run.rounds + before.rounds,
        run.steps + before.steps,
        run.megabytes(numbers) + before.megabytes(numbers),
    )


def largest_fall(trials: Sequence[Trial]) -> float:
    """How far the mean accuracy of the trials falls below its best so far, in points."""
    mean = curves(trials).mean(0)
    return float((np.maximum.accumulate(mean) - mean).max())


def rounds_to(trials: Sequence[Trial], percent: float) -> int | None:
    """The first round, from 1, after which the mean accuracy of the trials reaches it.

    Args:
        trials: Of one row.
        percent: The accuracy.
    """
    reached = np.flatnonzero(curves(trials).mean(0) >= percent)
    return int(reached[0]) + 1 if len(reached) else None


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n − 1); the value alone where there is one."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def rate_points(seen: CaseRecords) -> tuple[list[int], list[float]]:
    """(T, mean_k V_k) for every T that was learned."""
    found = {rounds: seen.weights(f"rounds-{rounds}") for rounds in RATE_ROUNDS}
    points = {t: float(weight_variances(theta).mean()) for t, theta in found.items() if theta is not None}
    return list(points), list(points.values())


def rate_fit(rounds: Sequence[int], variances: Sequence[float]) -> tuple[float, float]:
    """Least squares of log V on log T: (slope, intercept).

    Args:
        rounds: T.
        variances: V.
    """
    slope, intercept = np.polyfit(np.log(rounds), np.log(variances), 1)
    return float(slope), float(intercept)


def slopes(rounds: Sequence[int], variances: Sequence[float]) -> str:
    """The slope over all T, and where the variance first rises, the one from its peak on.

    Args:
        rounds: T.
        variances: V.
    """
    text = f"{rate_fit(rounds, variances)[0]:.2f} over all T"
    peak = int(np.argmax(variances))
    if 0 < peak < len(rounds) - 1:
        text += f", {rate_fit(rounds[peak:], variances[peak:])[0]:.2f} from the peak at T = {rounds[peak]} on"
    return text


def rate(seen: CaseRecords) -> str:
    """The variances beside 1/√T, and the fitted slope."""
    rounds, variances = rate_points(seen)
    rows = [[str(t), f"{v:.5f}", f"{t**-0.5:.5f}"] for t, v in zip(rounds, variances, strict=True)]
    text = "### Variance of the learned weights\n\n" + markdown(["T", "mean variance", "1/√T"], rows)
    if len(rounds) > 1:
        text += f"\nFitted slope on logarithmic axes: {slopes(rounds, variances)}.\n"
    return text


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown(["T", "V"], [["4", "0.5"]]), end="")
    | T | V |
    | --- | --- |
    | 4 | 0.5 |
    """
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def template(name: str) -> str:
    """What results.md says whatever came out."""
    return (resources.files("fedunfold.studies") / "template" / f"{name}.md").read_text(encoding="utf-8")

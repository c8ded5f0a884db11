"""What outer steps are worth: loss and accuracy against the time that learning took, by the fast schedule and the
paper's.

Both are judged on the same samples of minibatches and absences, which neither learned on: the outer loss of a sample
`check-i` under the weights of an iteration, and the test accuracy of trials trained with them. Only the learning is
timed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.params import device_of
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.plotting import COLOURS, MARKERS
from fedunfold.rules.fixed import fixed
from fedunfold.runs.system_info import machine
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import FAST, Learning, learn, published
from fedunfold.unfolding.adjoint import unroll_and_grad
from fedunfold.unfolding.outer_loss import Path

CHECKS, TRIALS = 8, 10


@dataclass(frozen=True)
class Standing:
    """A weight-learning run after some iterations: seconds so far, outer losses and accuracies (%) by sample."""

    iteration: int
    seconds: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies)


@dataclass(frozen=True)
class Schedules:
    """By environment and schedule, from the weights by size on."""

    machine: Mapping[str, Any]
    environments: Mapping[str, Mapping[str, tuple[Standing, ...]]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_schedules(names: Sequence[str], device: str, log: Callable[[str], None] = lambda what: None) -> Schedules:
    """Learn by both schedules on every environment, and check where they stand on the way."""
    found: dict[str, dict[str, tuple[Standing, ...]]] = {}
    for name in names:
        env = environment(name)
        federation = SimulatedFederation(env, device=device_of(device))
        how = {
            "fast": Learning(**FAST),
            "paper": Learning(**published(env.paper_schedule.iterations, env.paper_schedule.lr)),
        }
        learn(federation, min(2, env.rounds), learning=Learning(iterations=1))  # compiles and warms up
        for schedule, learning in how.items():
            log(f"{name}, {schedule}: {learning.iterations} steps")
            found.setdefault(name, {})[schedule] = _standings(env, federation, learning)
    return Schedules(machine(device), found)


def _standings(env: Environment, federation: SimulatedFederation, learning: Learning) -> tuple[Standing, ...]:
    began = time.perf_counter()
    seconds = [0.0]
    learned = learn(
        federation, env.rounds, learning=learning, on_iteration=lambda _: seconds.append(time.perf_counter() - began)
    )
    return tuple(
        Standing(m, seconds[m], *_judged(federation, learned.history[m]))
        for m in checked_iterations(learning.iterations)
    )


def checked_iterations(iterations: int) -> list[int]:
    """All iterations up to 15, every 1.6th power from there on, and the last."""
    chosen, ahead = [0], 1
    while ahead < iterations:
        chosen.append(ahead)
        ahead = ahead + 1 if ahead < 15 else round(ahead * 1.6)
    return [*chosen, iterations]


def _judged(federation: SimulatedFederation, weights: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    start = federation.initial_model("learn-0")  # learning begins from there too
    losses = []
    for i in range(CHECKS):
        runs, models = [f"check-{i}"], [start]
        (found,) = unroll_and_grad(
            federation, weights.sqrt(), Algorithm(), Path(), "first_order", runs=runs, models=models
        )
        losses.append(found.loss)
    trials = [f"trial-{i}" for i in range(TRIALS)]
    results = run_rounds(federation, fixed(weights), len(weights), trials)
    return tuple(losses), tuple(100 * result.scores[-1] for result in results)


def time_to(standings: Sequence[Standing], loss: float) -> Standing | None:
    """The first check at which the loss was reached."""
    return next((standing for standing in standings if standing.loss <= loss), None)


def schedules_page(found: Schedules, figure: str) -> str:
    """Markdown."""
    made = found.machine
    lines = [
        "# Schedules\n",
        "Made by `python -m benchmarks schedules`: weights learned by the fast schedule and by the paper's, both "
        f"judged on the same {CHECKS} samples for the outer loss and the same {TRIALS} trials for the accuracy, which "
        f"neither learned on (± is the standard deviation). Machine: {made['device']}, {made['cores']} cores, "
        f"torch {made['torch']}.\n",
        f"![Outer loss and accuracy against the time of learning]({figure})\n",
        "| environment | schedule | steps | s | outer loss | accuracy (%) | reaches the paper's last loss after |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, by in found.environments.items():
        goal = by["paper"][-1].loss
        first = by["fast"][0]
        lines.append(f"| {name} | by size | 0 | 0 | {first.loss:.1f} | {_spread(first.accuracies)} | |")
        for schedule, standings in by.items():
            last, there = standings[-1], time_to(standings, goal)
            reached = "never" if there is None else f"{there.iteration} steps, {there.seconds:.2f} s"
            lines.append(
                f"| {name} | {schedule} | {last.iteration} | {last.seconds:.2f} | {last.loss:.1f} | "
                f"{_spread(last.accuracies)} | {reached} |"
            )
    return "\n".join(lines) + "\n"


def schedules_figure(found: Schedules) -> Figure:
    """Outer loss and accuracy against seconds, a row for each environment."""
    figure = Figure(figsize=(9, 3.1 * len(found.environments)), layout="constrained")
    grid: Any = figure.subplots(len(found.environments), 2, squeeze=False)
    for (name, by), (left, right) in zip(found.environments.items(), grid, strict=True):
        for axes, of, label in ((left, "losses", "outer loss"), (right, "accuracies", "test accuracy (%)")):
            for i, (schedule, standings) in enumerate(by.items()):
                seconds = [standing.seconds for standing in standings]
                values = np.array([getattr(standing, of) for standing in standings])
                mean, sd = values.mean(1), values.std(1, ddof=1)
                steps = f"{schedule}, {standings[-1].iteration} steps"
                axes.plot(seconds, mean, color=COLOURS[i], marker=MARKERS[i], ms=4, lw=1.5, label=steps)
                axes.fill_between(seconds, mean - sd, mean + sd, color=COLOURS[i], alpha=0.15, lw=0)
            first, longest = by["fast"][1].seconds, max(standings[-1].seconds for standings in by.values())
            axes.set_xscale("symlog", linthresh=first, linscale=0.4)
            decades = 10.0 ** np.arange(np.ceil(np.log10(first)), np.log10(longest) + 1)
            axes.set_xticks([0, *decades], labels=["0", *(f"{decade:g}" for decade in decades)])
            axes.set_xlim(right=1.3 * longest)
            axes.set_title(f"{name}: {label}", loc="left", fontsize=10)
            axes.set_xlabel("seconds of learning")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#dddddd", lw=0.6)
        left.legend(frameon=False)
    return figure


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"

"""What a rule decides where one feature changes and all others stay at their mean: read off the rule, and drawn."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks.rule.entrants import FEATURES, RULE
from benchmarks.rule.records import Record, write_text
from fedunfold.core.algorithm import Algorithm
from fedunfold.plotting import ShownFigure, line_style, save
from fedunfold.rules.features import CLIENT_FEATURES, RoundFeatures
from fedunfold.rules.unfolded import UnfoldedRule

POINTS = 25
CLIENTS = 10
STYLES = 8
"""Further lines are dashed, in colours that were used before."""
FILE = "responses.json"
FIGURES = {"weights": "weights-by-feature.png", "step": "step-by-feature.png"}


def responses(rule: UnfoldedRule, met: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Θ_k/p_k of one client among ten alike, and s of a round of ten alike clients.

    Args:
        rule: The rule.
        met: Mean, low and high end of every feature where it was met.

    Returns:
        For each feature its values `x` and what is decided there, `y`: log(Θ_k/p_k) under `weights`, s under `step`.
    """
    mean = torch.tensor(met["mean"], dtype=torch.float64)
    own = len(CLIENT_FEATURES)

    def decide(place: int, value: float) -> tuple[float, float]:
        of_clients, of_round = mean[:own].repeat(CLIENTS, 1), mean[own:].clone()
        if place < own:
            of_clients[0, place] = value
        else:
            of_round[place - own] = value
        shares = torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)
        with torch.no_grad():
            decided = rule.decide(RoundFeatures(torch.arange(CLIENTS), shares, of_clients, of_round, {}), CLIENTS)
        weight = float((decided.weights[0] / shares[0]).log())
        return weight, float(decided.step / (1 - decided.momentum))

    found: dict[str, Any] = {"weights": {}, "step": {}}
    for name in FEATURES:
        place = FEATURES.index(name)
        x = torch.linspace(met["low"][place], met["high"][place], POINTS, dtype=torch.float64).tolist()
        kind = "weights" if name in CLIENT_FEATURES else "step"
        y = [decide(place, value)[kind == "step"] for value in x]
        found[kind][name] = {"x": [round(v, 4) for v in x], "y": [round(v, 4) for v in y]}
    return found


def features_met(records: Sequence[Record]) -> dict[str, list[float]]:
    """The mean of each feature over the federations of the rule's records, and the ends of most of its values: the 5th
    percentile of the low ends, the 95th of the high ones."""
    met = [record.about["features"] for record in records if record.method == RULE and "features" in record.about]
    if not met:
        return {}
    mean, low, high = (torch.tensor([own[end] for own in met]) for end in ("mean", "low", "high"))
    ends = {"mean": mean.mean(0), "low": low.quantile(0.05, 0), "high": high.quantile(0.95, 0)}
    return {name: values.tolist() for name, values in ends.items()}


def save_responses(rule: UnfoldedRule, algorithm: Algorithm, records: Sequence[Record], out: Path) -> None:
    """Write what the rule decides beside the records, where the ablation's tell which features it met.

    Args:
        rule: The rule.
        algorithm: What it is for.
        records: Those of the ablation.
        out: The page's folder.
    """
    if not (met := features_met(records)):
        return
    found = {"algorithm": algorithm.describe(), **responses(rule, met)}
    write_text(out / FILE, json.dumps(found, indent=1) + "\n")


def draw(found: Mapping[str, Any], out: Path) -> None:
    """The two figures, as PNG in a folder."""
    for kind, what, label in (("weights", "a client's feature", "log(Θ/p)"), ("step", "a feature of the round", "s")):
        figure = ShownFigure(figsize=(7.5, 4.5), layout="constrained")
        axes = _axes(figure.add_subplot(), f"{what}, as part of its usual range", label)
        for i, (name, points) in enumerate(found[kind].items()):
            low, high = points["x"][0], points["x"][-1]
            part = [(value - low) / (high - low) if high > low else 0.5 for value in points["x"]]
            style = line_style(i, POINTS) | {"linestyle": "-" if i < STYLES else "--"}
            axes.plot(part, points["y"], label=f"{name}  {low:.1f} … {high:.1f}", **style)
        axes.legend(frameon=False, fontsize=8, title="feature, from … to", loc="center left", bbox_to_anchor=(1, 0.5))
        save(figure, out / FIGURES[kind])


def _axes(axes: Axes, x: str, y: str) -> Axes:
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    return axes

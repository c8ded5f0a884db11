"""The parts of the page that set the rule beside its rivals, each from the records of a section."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rule.entrants import RULE
from benchmarks.rule.records import Record
from benchmarks.rule.sections import GRID, KEPT, NATURAL, SECTIONS, mean_gains
from benchmarks.rule.statistics import part_of_rounds
from benchmarks.rule.view import Bar, Part, View, in_order
from fedunfold.studies.benchmark.markdown import by_method, spread, table
from fedunfold.studies.benchmark.statistics import interval

STORED = Path(__file__).parents[2] / "docs" / "results"
LEARNED_HERE = "digits-label-skew"
"""Digits are among the data that a rule is learned on."""
FINAL_BARS = {"mnist-1": 89.8, "mnist-2": 79.0, "mnist-3": 86.0, "mnist-4": 88.5, "dogs-a": 81.5, "dogs-b": 81.5}
ROUNDS_BAR = 0.5
WISDM_BARS = {"wisdm": 77.0, "wisdm-sampled": 76.0}
AHEAD = 1.0
"""So many points the rule is to be above its best rival on these."""
STORED_METHODS = {"duw-fedavg": ("duw-fedavg",), "fedunfold-table": ("fedunfold-table", "fedunfold")}
"""Table methods whose weights are learned for each federation anew, by the names their records may have."""
METHODS = (KEPT, "fedavg", *(f"{base} (tuned)" for base in GRID), *STORED_METHODS, RULE)


def paper(records: Sequence[Record]) -> Part:
    """The paper's environments, also with its own table method."""
    section = SECTIONS["paper"]
    view, stored = View(records, section.last), stored_curves()
    environments = in_order(view.environments, section.environments)

    def curves(environment: str, method: str) -> list[list[float]]:
        kept = stored.get(environment, {}).get(method)
        return kept or [record.scores or [0.0] for record in view.records(environment, method)]

    def final(environment: str, method: str) -> str:
        return spread([curve[-1] for curve in curves(environment, method)])

    def mean(environment: str, method: str) -> str:
        return spread([fmean(curve) for curve in curves(environment, method)])

    bars: list[Bar] = []
    numbers: dict[str, Any] = {}
    for environment in environments:
        ours = [record.score(1) for record in view.records(environment, RULE)]
        if not ours:
            continue
        numbers[environment] = {"final": fmean(ours)}
        if (least := FINAL_BARS.get(environment)) is not None:
            bars.append(Bar(f"{environment}: final score {fmean(ours):.2f}, at least {least:g}.", fmean(ours) >= least))
        for rival in (KEPT, "fedavg"):
            gains = view.gains(environment, RULE, rival, score=lambda record: record.mean or 0.0)
            if gains:
                found = interval(gains)
                text = (
                    f"{environment}{_note(environment)}: mean over all rounds {found.text()} over {rival}, at least 0."
                )
                bars.append(Bar(text, found.mean >= 0))
                numbers[environment][f"mean over {rival}"] = found.as_json()
    parts = {
        environment: part_of_rounds(view.curve(environment, RULE), view.curve(environment, KEPT)[-1])
        for environment in environments
        if {RULE, KEPT} <= set(view.methods(environment)) and environment != LEARNED_HERE
    }
    if parts:
        listed = ", ".join(f"{environment} {part:.2f}" for environment, part in parts.items())
        text = f"rounds to FedAvg's final score as a part of T ({listed}): median {median(parts.values()):.2f}, "
        bars.append(Bar(f"{text}at most {ROUNDS_BAR:g}.", median(parts.values()) <= ROUNDS_BAR))
    text = (
        "Final score, in percent: mean ± sd over the trials. `fedavg (keep)` treats absent clients as the paper does, "
        "all other rivals drop them. `duw-fedavg` and `fedunfold-table` learn weights for the very federation; their "
        "results are those of [mnist](../mnist/results.md) and [dogs](../dogs/results.md). Digits are in the "
        "pre-training distribution, so `digits-label-skew` says nothing about other data.\n\n"
        f"{by_method(environments, METHODS, final)}\nMean over all rounds:\n\n"
        f"{by_method(environments, METHODS, mean)}\n"
        "Rounds to FedAvg's final score are read off the mean curves over the trials; never counts 1."
    )
    return Part("The paper's environments", text, bars, numbers | {"rounds": parts})


def stored_curves() -> dict[str, dict[str, list[list[float]]]]:
    """Of the table methods the score after every round of every trial, in percent, by environment."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for study in ("mnist", "dogs"):
        cases = json.loads((STORED / study / "results.json").read_text(encoding="utf-8"))["cases"]
        for environment, methods in cases.items():
            for label, names in STORED_METHODS.items():
                if name := next((name for name in names if name in methods), None):
                    curves = [[100 * score for score in trial] for trial in methods[name]["accuracies"]]
                    found.setdefault(environment, {})[label] = curves
    return found


def tuning(records: Sequence[Record]) -> Part:
    """How the rivals' settings were chosen."""
    gains = mean_gains(records, SECTIONS["tuning"].last)
    count = len({record.environment for record in records})
    rows, chosen = [], {}
    for base, servers in GRID.items():
        known = [server for server in servers if f"{base} {server}" in gains]
        if not known:
            continue
        chosen[base] = max(known, key=lambda server: gains[f"{base} {server}"])
        for server in known:
            gain = f"{gains[f'{base} {server}']:+.2f}"
            rows.append([base, f"**{server}**" if server == chosen[base] else server, gain])
    text = (
        f"On {count} federations of the distribution that the rule is learned on, others than those: mean gain over "
        "FedAvg of the last three rounds, in points. One setting is chosen for all federations, with all clients in "
        "every round or some; a run that diverges scores 0. The chosen one, in bold, is called `(tuned)`.\n\n"
        f"{table(['rival', 'server', 'gain'], rows)}"
    )
    return Part("The rivals' settings", text, (), {"chosen": chosen, "gains": gains})


def dirichlet(records: Sequence[Record]) -> Part:
    """Many clients of which few take part in a round."""
    view = View(records, SECTIONS["dirichlet"].last)
    bars = []
    for environment in view.environments:
        if found := view.against_best(environment):
            rival, gain = found
            bars.append(Bar(f"{environment}: {gain.text()} over the best rival, {rival}, above 0.", gain.low > 0))
    smallest = [record.about["smallest_client"] for record in records if "smallest_client" in record.about]
    text = (
        "MNIST divided anew in each trial: the rows of a class go to the clients by shares from a Dirichlet "
        "distribution with parameter 0.1. A client that gets fewer than two rows is given some of the largest "
        f"client's (the smallest client has {min(smallest, default=0)}). Perceptron (128, 128), two epochs of "
        "minibatches of 50, learning rate 0.01; a score is the mean of the last five rounds.\n\n"
        f"{_scores_and_gains(view, 'dirichlet')}"
    )
    return Part("Many clients, few in a round", text, bars, _numbers(view))


def natural(records: Sequence[Record]) -> Part:
    """Federations whose clients are real."""
    view = View(records, SECTIONS["natural"].last)
    bars = []
    for environment in in_order(view.environments, NATURAL):
        found = view.against_best(environment)
        if found is None:
            continue
        rival, gain = found
        against = f"{environment}: {gain.text(view.digits(environment))} over the best rival, {rival}"
        if (least := WISDM_BARS.get(environment)) is not None:
            ours = fmean(view.scores(environment, RULE))
            bars.append(Bar(f"{environment}: final score {ours:.2f}, at least {least:g}.", ours >= least))
            bars.append(Bar(f"{against}, at least {AHEAD:+g}.", gain.mean >= AHEAD))
        else:
            bars.append(Bar(f"{against}, not below it beyond noise.", gain.high >= 0))
    text = (
        "Final scores on the pooled test set. Of a perplexity lower is better; a positive difference always says that "
        f"the rule is better.\n\n{_scores_and_gains(view, 'natural')}"
    )
    return Part("Natural federations", text, bars, _numbers(view))


def _scores_and_gains(view: View, section: str) -> str:
    environments = in_order(view.environments, SECTIONS[section].environments)
    heads = [f"{name}, {view.metric(name)}" for name in environments]

    def cell(head: str, method: str) -> str:
        environment = head.partition(",")[0]
        return spread(view.scores(environment, method), view.digits(environment))

    def gain(head: str, method: str) -> str:
        environment = head.partition(",")[0]
        gains = [] if method == RULE else view.gains(environment, RULE, method)
        return interval(gains).text(view.digits(environment)) if gains else "–"

    differences = by_method(heads, METHODS, gain, first="the rule's gain over")
    counts = ", ".join(f"{name} {len(view.records(name, RULE))}" for name in environments)
    return (
        f"{by_method(heads, METHODS, cell)}\nPaired differences with 95 % intervals; trials: {counts}.\n\n{differences}"
    )


def _numbers(view: View) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for environment in view.environments:
        found[environment] = {method: fmean(view.scores(environment, method)) for method in view.methods(environment)}
        if against := view.against_best(environment):
            found[environment] |= {"best rival": against[0], "gain over it": against[1].as_json()}
    return found


def _note(environment: str) -> str:
    return " (digits are in the pre-training distribution)" if environment == LEARNED_HERE else ""

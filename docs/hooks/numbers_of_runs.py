"""Tables of README.md and docs/when.md, and the figure of the latter, from the records of the runs in docs/results.

`python docs/hooks/numbers_of_runs.py` writes them again; the site's build and a test check that they are up to date.
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
CASES = {
    "mnist-1": "quantity skew",
    "mnist-2": "label skew",
    "mnist-3": "unequal epochs",
    "mnist-4": "flaky clients",
    "dogs-a": "label skew, flaky clients",
    "dogs-b": "label skew, flaky clients, unequal epochs",
}
METHODS = ("fedavg", "dr-fedavg", "fednova", "duw-fedavg", "fedunfold-table", "fedavg-budget")
PRETRAINED = "fedunfold"
SUMMARY = ("fedavg", PRETRAINED, "duw-fedavg", "fedunfold-table", "fedavg-budget")
TITLES = {PRETRAINED: "**fedunfold**", "fedavg-budget": "fedavg, more rounds"}
RULE = DOCS / "results" / "rule"
PARTS = ("weights", "s", "β", "a")
OTHERS = {"fedavg": "FedAvg", "formula": "the formula", "private": "the rule for secure sums"}
DECISIONS = tuple(f"rule without {parts}" for parts in (*PARTS, " ".join(PARTS)))
NOT_RUN = "Not measured yet: `python -m benchmarks rule --rule FILE --out docs/results/rule --only ablation`.\n"
BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)


def final(entry: dict[str, Any]) -> list[float]:
    """Test accuracy after the last round of every trial, in percent."""
    return [100 * trial[-1] for trial in entry["accuracies"]]


def cases() -> dict[str, dict[str, Any]]:
    """The records of every environment, by its name."""
    found: dict[str, Any] = {}
    for study in ("mnist", "dogs"):
        found |= json.loads((DOCS / "results" / study / "results.json").read_text(encoding="utf-8"))["cases"]
    for record in json.loads((RULE / "records" / "paper.json").read_text(encoding="utf-8")):
        if record["method"] == "rule" and record["environment"] in CASES:
            own = found[record["environment"]].setdefault(PRETRAINED, {"accuracies": []})
            own["accuracies"].append([score / 100 for score in record["scores"]])
    return {name: found[name] for name in CASES}


def accuracies(methods: Sequence[str] = METHODS) -> str:
    """Mean ± standard deviation over the trials, a row for each environment."""
    heads = ["environment", "what is uneven", *(TITLES.get(name, name) for name in methods)]
    rows = [heads, ["---"] * 2 + ["---:"] * len(methods)]
    for name, entries in cases().items():
        values = [final(entries[method]) for method in methods]
        # No-break spaces: a mean and its deviation belong on one line.
        spread = [
            f"{statistics.fmean(v):.1f} ± {statistics.stdev(v):.1f}".replace(" ", "\N{NO-BREAK SPACE}") for v in values
        ]
        rows.append([name, CASES[name], *spread])
    return _markdown(rows)


def remembering() -> str:
    """What remembering absent clients brings by itself, and what learning adds to it."""
    names = ("fedavg", "fedavg-remember", "fednova", "fednova-remember", "fedunfold-table")
    rows = [
        ["environment", *(name.replace("-remember", ", remember") for name in names)],
        ["---"] + ["---:"] * len(names),
    ]
    for case in ("dogs-a", "dogs-b"):
        entries = cases()[case]
        rows.append([case, *(f"{statistics.fmean(final(entries[name])):.1f}" for name in names)])
    return _markdown(rows)


def rule_features() -> str:
    """What a pre-trained rule loses without each thing that it sees."""
    return _ahead({name: found for name, found in _ablation().items() if name not in (*OTHERS, *DECISIONS)})


def rule_decisions() -> str:
    """What it loses without parts of its decision."""
    return _ahead({name: found for name, found in _ablation().items() if name in DECISIONS})


def rule_others() -> str:
    """What it gains over FedAvg and over the package's other rules."""
    return _ahead({name: found for name, found in _ablation().items() if name in OTHERS}, "over")


def formula() -> str:
    """The formula that comes with the package."""
    from fedunfold.rules.formula import unfolded_formula

    return f"```text\n{unfolded_formula().readable()}\n```\n"


def rule_figures() -> str:
    """The figures of what it decides, where they were drawn."""
    shown = {
        "weights-by-feature.png": "log(Θ/p) of one client against each of its features",
        "step-by-feature.png": "s against each feature of the round",
    }
    made = [f"![{title}](results/rule/{name})\n" for name, title in shown.items() if (RULE / name).exists()]
    return "\n".join(made) or NOT_RUN


def _ablation() -> dict[str, list[float | None]]:
    """By method, how far the complete rule is ahead of it: mean, low and high end of the 95 % interval."""
    file = RULE / "summary.json"
    if not file.exists():
        return {}
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"]
    found: dict[str, list[float | None]] = sections.get("ablation", {}).get("numbers", {})
    return found


def _ahead(found: dict[str, list[float | None]], head: str = "without") -> str:
    if not found:
        return NOT_RUN
    rows = [[head, "the complete rule is ahead by, in points", "95 % interval"], ["---", "---:", "---:"]]
    for name, (mean, low, high) in found.items():
        bounds = "–" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"
        what = OTHERS.get(name) or " and ".join(name.removeprefix("rule without ").split())
        rows.append([what, "–" if mean is None else f"{mean:+.2f}", bounds])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


TABLES: dict[str, Callable[[], str]] = {
    "accuracies": accuracies,
    "summary": partial(accuracies, SUMMARY),
    "remembering": remembering,
    "rule_features": rule_features,
    "rule_decisions": rule_decisions,
    "rule_others": rule_others,
    "formula": formula,
    "rule_figures": rule_figures,
}


def filled(text: str) -> str:
    """A page with every marked table as the records have it."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def draw(path: Path) -> None:
    """Points gained over FedAvg by learned weights, and by FedAvg with as many rounds as learning them took."""
    from matplotlib.figure import Figure

    shown = {"duw-fedavg": "learned (duw-fedavg)", "fedunfold-table": "recommended (fedunfold-table)"}
    shown["fedavg-budget"] = "FedAvg with the rounds that learning took"
    colours = ["#0072B2", "#D55E00", "#999999"]
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, (method, title) in enumerate(shown.items()):
        gains = [
            statistics.fmean(final(entries[method])) - statistics.fmean(final(entries["fedavg"]))
            for entries in cases().values()
        ]
        places = [place + 0.27 * (i - 1) for place in range(len(gains))]
        axes.bar(places, gains, 0.25, label=title, color=colours[i])
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(CASES)), CASES)
    axes.set_ylabel("points gained over FedAvg")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
    draw(DOCS / "when.png")

"""The page of a benchmark, from its records alone: README.md, results.json and the diagrams."""

import json
from collections.abc import Callable
from pathlib import Path

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import write_atomically
from fedunfold.plotting import save
from fedunfold.studies.benchmark.contenders import LEARNED
from fedunfold.studies.benchmark.figures import critical_difference_diagram, curves
from fedunfold.studies.benchmark.markdown import by_method, spread, table
from fedunfold.studies.benchmark.records import RunRecords
from fedunfold.studies.benchmark.statistics import ALPHA
from fedunfold.studies.benchmark.summary import KINDS, REFERENCE, Cell, Kind, Summary
from fedunfold.studies.tables import markdown

PAGE, RESULTS, RECORDS = "README.md", "results.json", "records"
MARKS = {LEARNED: "§", "label counts": "†", "server data": "‡"}
OTHER_MARK = "¶"
TITLES = {"chosen": "settings chosen here", "default": "settings chosen beforehand"}


def write_page(folder: Path) -> Path:
    """Write what the records in `records` say; nothing is run for it.

    Args:
        folder: The benchmark's folder.

    Returns:
        The page. results.json depends on the runs alone, the page also on how long they took.

    Raises:
        InputError: There are no records of a trial.
    """
    summary = Summary(RunRecords(folder / RECORDS))
    if not summary.environments:
        raise InputError(f"{folder / RECORDS} holds no trial yet; run the benchmark first.")
    page = _Page(summary)
    for kind in KINDS:
        if (ranking := summary.ranking(kind)) is not None:
            title = f"{summary.about['name']}, {TITLES[kind]}: mean ranks, environments: {ranking['environments']}"
            save(critical_difference_diagram(ranking, title), folder / f"ranks-{kind}.png")
    save(curves(summary, "chosen"), folder / "curves.png", dpi=90)
    document = json.dumps(summary.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    _write(folder / RESULTS, document)
    _write(folder / PAGE, page.text())
    return folder / PAGE


class _Page:
    def __init__(self, summary: Summary) -> None:
        self._of = summary
        used = [set(summary.method(name)["uses"]) for name in summary.methods]
        self._labels = {
            name: name + "".join(sorted({MARKS.get(use, OTHER_MARK) for use in uses}))
            for name, uses in zip(summary.methods, used, strict=True)
        }
        self._used = sorted(set().union(*used))

    def text(self) -> str:
        """All of it."""
        parts = [self._head(), *(self._ranks(kind) for kind in KINDS), self._finals()]
        parts += [self._gains(), self._wins(), self._speed(), self._fairness(), self._settings(), self._price()]
        return "\n\n".join(part.strip() for part in parts if part) + "\n"

    def _head(self) -> str:
        about, summary = self._of.about, self._of
        lines = [f"# Benchmark: {about['name']}", about["description"]]
        lines.append(
            "Made by `fedunfold benchmark` from the records in `records`; every number here is computed from them. All "
            "methods have the same rounds, the same clients a round, the same initial models, minibatches and absences "
            "in the same trial, and choose among as many settings. *Chosen here*: the setting that was best on "
            "rows that clients of the very federation held out of training, in runs of their own; no method sees the "
            "test set before its trials. *Chosen beforehand*: one setting for all federations, from drawn ones or from "
            "the literature. A run that diverged counts 0 (or, where lower is better, the worst score of any run "
            "there)."
        )
        rows = []
        for name in summary.environments:
            own = about["environments"][name]
            cohort = own["clients_per_round"]
            trials = {len(c.records) for m in summary.methods for k in KINDS if (c := summary.cell(k, name, m))}
            cells = [name, own["description"] + (f" {own['notes']}" if own["notes"] else "")]
            cells += [str(own["clients"]) + (f", {cohort} a round" if cohort else ""), str(own["rounds"])]
            rows.append([*cells, " to ".join(map(str, sorted({min(trials), max(trials)}))) if trials else "–"])
        lines.append(markdown(["environment", "what it is", "clients", "rounds", "trials"], rows))
        lines += [f"**Left out, {name}:** {own['left_out']}" for name, own in about["environments"].items()
                  if own["left_out"]]  # fmt: skip
        if about["without"]:
            lines.append(f"Not run: {', '.join(about['without'])}. {about['reason']}")
        for (environment, method), reason in summary.refusals().items():
            lines.append(f"**{method} cannot be run on {environment}:** {reason}")
        marks = [f"{MARKS.get(use, OTHER_MARK)} {use}" for use in self._used]
        if marks:
            lines.append(f"What some methods are given and others are not: {'; '.join(marks)}.")
        return "\n\n".join(line.strip() for line in lines)

    def _ranks(self, kind: Kind) -> str:
        ranking = self._of.ranking(kind)
        if ranking is None:
            return ""
        ordered = sorted(ranking["mean_ranks"].items(), key=lambda entry: entry[1])
        rows = [[self._labels[method], f"{rank:.2f}"] for method, rank in ordered]
        tested = ranking["friedman"]
        friedman = "" if tested is None else f"Friedman's test: χ² = {tested['chi2']:.2f}, p = {tested['p']:.3g}. "
        unranked = f" Not ranked, for want of a score somewhere: {', '.join(ranking['unranked'])}."
        return (
            f"## Mean ranks, {TITLES[kind]}\n\n{friedman}Mean ranks further apart than "
            f"{ranking['critical_difference']:.2f} differ significantly (Nemenyi, α = {ALPHA:g}, "
            f"environments: {ranking['environments']}).{unranked if ranking['unranked'] else ''}\n\n"
            f"![Mean ranks; bars join methods that do not differ significantly](ranks-{kind}.png)\n\n"
            f"{table(['method', 'mean rank'], rows)}"
        )

    def _finals(self) -> str:
        def final(cell: Cell) -> str:
            text = spread(cell.finals, self._digits(cell))
            return text + (f" ({cell.diverged} diverged)" if cell.diverged else "")

        parts = ["## Final score\n\nMean ± standard deviation over the trials, on the test set."]
        parts += [f"{TITLES[kind].capitalize()}:\n\n{self._by_method(kind, final, metric=True)}" for kind in KINDS]
        parts.append("![Mean score after every round](curves.png)")
        return "\n\n".join(parts)

    def _gains(self) -> str:
        parts = [
            f"## Gain over {REFERENCE}\n\nPaired by trial, with 95 % intervals of Student's t; positive is better."
        ]
        for kind in KINDS:

            def gain(environment: str, method: str, kind: Kind = kind) -> str:
                found = None if method == REFERENCE else self._of.gain(kind, environment, method)
                return "–" if found is None else found.text(self._digits_of(environment))

            parts.append(f"{TITLES[kind].capitalize()}:\n\n{self._table(gain)}")
        return "\n\n".join(parts)

    def _wins(self) -> str:
        wins, means, methods = self._of.wins("chosen"), self._of.means("chosen"), self._of.methods
        if len(methods) < 2:
            return ""

        def cell(a: str, b: str) -> str:
            return "" if a == b else f"{'/'.join(map(str, wins[a][b]))} ({':'.join(map(str, means[a][b]))})"

        rows = [[self._labels[a], *(cell(a, b) for b in methods)] for a in methods]
        return (
            "## Wins, ties, losses\n\nOf the row's method against the column's, in environments, with settings chosen "
            f"here. A win has p ≤ {ALPHA:g} in the paired t-test over the trials, corrected after Holm for all pairs "
            f"in the environment; without it, or with fewer than three trials, there is a tie. In brackets, in how "
            f"many environments the mean alone is better and worse.\n\n"
            f"{table(['method', *methods], rows)}"
        )

    def _speed(self) -> str:
        def rounds(cell: Cell) -> str:
            target = self._of.target("chosen", cell.records[0].environment)
            found = None if target is None else cell.rounds_to(target)
            return "never" if found is None else str(found)

        def megabytes(cell: Cell) -> str:
            target = self._of.target("chosen", cell.records[0].environment)
            found = None if target is None else cell.megabytes_to(target)
            return "never" if found is None else f"{found:,.1f}"

        targets = [
            f"{name} {target:.{self._digits_of(name)}f}"
            for name in self._of.environments
            if (target := self._of.target("chosen", name)) is not None
        ]
        area = self._by_method("chosen", lambda cell: spread(cell.areas, self._digits(cell)), metric=True)
        parts = [
            "## How fast\n\nArea under the curve, the mean score over all rounds, with settings chosen here:\n\n" + area
        ]
        if targets:
            parts.append(
                f"Rounds until the mean curve reaches {REFERENCE}'s final mean score ({', '.join(targets)}); where "
                f"weights are learned, with the rounds that learning took:\n\n{self._by_method('chosen', rounds)}"
            )
            parts.append(
                "Megabytes sent until then, of models in single precision to and from the clients that took part, and "
                f"of what a method sends besides:\n\n{self._by_method('chosen', megabytes)}"
            )
        return "\n\n".join(parts)

    def _fairness(self) -> str:
        def clients(cell: Cell) -> str:
            found, digits = cell.clients, self._digits(cell)
            if not found:
                return "–"
            return f"{found['mean']:.{digits}f} / {found['worst']:.{digits}f} / {found['sd']:.{digits}f}"

        return (
            "## Fairness\n\nThe final model's score on every client's own training data: mean / mean of the worst "
            "tenth / standard deviation over the clients, with settings chosen here.\n\n"
            f"{self._by_method('chosen', clients)}"
        )

    def _settings(self) -> str:
        rows = []
        for method in self._of.methods:
            about = self._of.method(method)
            if not about["grid"]:
                continue
            source = "the suite" if about["default"] else "the literature"
            if about["tuned_on"]:
                source = f"{about['tuned_on']} drawn federations"
            default = f"{about['default'] or 'as it is'} ({source})"
            cells = [self._of.cell("chosen", name, method) for name in self._of.environments]
            chosen = ["–" if cell is None else cell.settings for cell in cells]
            rows.append([method, " · ".join(about["grid"]), default, *chosen])
        heads = ["method", "grid", "chosen beforehand, by", *(f"chosen in {name}" for name in self._of.environments)]
        trials = self._of.about["tuning_trials"]
        without = [method for method in self._of.methods if not self._of.method(method)["grid"]]
        nothing = f" Nothing is chosen for {', '.join(without)}." if without else ""
        times = "1 run" if trials == 1 else f"{trials} runs"
        return (
            f"## Settings\n\nEach setting of a grid was judged by {times} on a fifth "
            f"of every client's rows, held out of training.{nothing}\n\n{markdown(heads, rows)}"
        )

    def _price(self) -> str:
        seconds = self._by_method("chosen", lambda cell: f"{cell.seconds:.1f}")
        megabytes = self._by_method("chosen", lambda cell: f"{cell.megabytes:,.1f}")
        return (
            "## What it costs\n\nSeconds for a run, its tests included; learning weights is part of the first trial's:"
            f"\n\n{seconds}\n\nMegabytes for a run:\n\n{megabytes}"
        )

    def _by_method(self, kind: Kind, text: Callable[[Cell], str], *, metric: bool = False) -> str:
        def cell(environment: str, method: str) -> str:
            found = self._of.cell(kind, environment, method)
            return "–" if found is None else text(found)

        return self._table(cell, metric=metric)

    def _table(self, cell: Callable[[str, str], str], *, metric: bool = False) -> str:
        heads = {}
        for name in self._of.environments:
            primary = self._of.primary(name)
            heads[f"{name}, {primary.label}{primary.brackets()}{primary.direction}" if metric else name] = name
        methods = {label: name for name, label in self._labels.items()}
        return by_method(list(heads), methods, lambda head, label: cell(heads[head], methods[label])).strip()

    def _digits(self, cell: Cell) -> int:
        return 2 if cell.primary.is_percentage else 3

    def _digits_of(self, environment: str) -> int:
        return 2 if self._of.primary(environment).is_percentage else 3


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

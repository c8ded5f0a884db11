"""From the records of a benchmark to its numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, count
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np

from fedunfold.core.task import PrimaryMetric
from fedunfold.studies.benchmark.contenders import table_order
from fedunfold.studies.benchmark.plan import choose, tuning_means
from fedunfold.studies.benchmark.records import TRIAL, RunRecord, RunRecords
from fedunfold.studies.benchmark.statistics import (
    ALPHA,
    Interval,
    area,
    critical_difference,
    friedman,
    holm,
    interval,
    mean_ranks,
    paired_p,
    rounds_to,
)
from fedunfold.studies.costs import BYTES_PER_NUMBER

Kind = Literal["chosen", "default"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Settings chosen on validation rows of the very federation, and those that a method has anywhere."""
REFERENCE = "fedavg"
"""The method whose final mean score is the target of the others."""


@dataclass(frozen=True)
class Cell:
    """The trials of a method in an environment.

    Attributes:
        settings: What it was run with.
        records: A record for each trial.
        worst: The score of a run that diverged: 0, or, where lower is better, the worst that any run had in any round.
    """

    settings: str
    records: tuple[RunRecord, ...]
    worst: float

    @property
    def refused(self) -> str:
        """Why the method cannot be run here; nothing where it can."""
        return self.records[0].ended if self.records[0].refused else ""

    @property
    def primary(self) -> PrimaryMetric:
        return self.records[0].metric

    @property
    def diverged(self) -> int:
        """How many trials did."""
        return sum(record.diverged for record in self.records)

    @cached_property
    def finals(self) -> list[float]:
        """The score after the last round of every trial."""
        return [self.worst if record.final is None else record.final for record in self.records]

    @cached_property
    def areas(self) -> list[float]:
        """The mean score over the rounds of every trial."""
        return [area(record.scores) if record.scores else self.worst for record in self.records]

    @cached_property
    def curve(self) -> list[float]:
        """The mean score of the trials after every round; none where all diverged."""
        rounds = max(len(record.scores) for record in self.records)
        return [fmean(r.scores[t] if r.scores else self.worst for r in self.records) for t in range(rounds)]

    def rounds_to(self, target: float) -> int | None:
        """Rounds until the mean curve reaches a score, with those that learning weights took."""
        found = rounds_to(self.curve, target, greater_is_better=self.primary.greater_is_better)
        return None if found is None else found + round(self._mean_learning("rounds"))

    def megabytes_to(self, target: float) -> float | None:
        """What was sent until then, on average over the trials."""
        found = rounds_to(self.curve, target, greater_is_better=self.primary.greater_is_better)
        return None if found is None else self._sent(found)

    @property
    def megabytes(self) -> float:
        """What a whole run sends."""
        return self._sent(len(self.curve))

    @property
    def seconds(self) -> float:
        """How long a run took, on average; the first trial's includes learning the weights, where there are any."""
        return fmean(record.seconds for record in self.records)

    @property
    def clients(self) -> dict[str, float]:
        """Mean, sd and worst tenth of the clients' scores, means over the trials that did not diverge."""
        known = [record.clients for record in self.records if record.clients]
        return {name: fmean(own[name] for own in known) for name in known[0]} if known else {}

    @property
    def _ended(self) -> list[RunRecord]:
        return [record for record in self.records if record.scores]

    def _mean_learning(self, name: str) -> float:
        return fmean(record.learning.get(name, 0.0) for record in self._ended) if self._ended else 0.0

    def _sent(self, rounds: int) -> float:
        if not self._ended:
            return 0.0
        vectors = fmean(record.vectors * sum(record.participations[:rounds]) for record in self._ended)
        return vectors * self._ended[0].parameters * BYTES_PER_NUMBER / 1e6 + self._mean_learning("megabytes")


class Summary:
    """What the records of a suite say.

    Args:
        records: They.
    """

    def __init__(self, records: RunRecords) -> None:
        self.about = records.suite()
        self._records = records
        self._methods: Mapping[str, Mapping[str, Any]] = self.about["methods"]
        self._chosen: dict[tuple[str, str], str | None] = {}
        self._cells: dict[tuple[Kind, str, str], Cell] = {}
        for environment in self.about["environments"]:
            worst = self._worst(environment)
            for method, about in self._methods.items():
                for kind in KINDS:
                    settings = self.settings(kind, environment, method)
                    found = () if settings is None else tuple(self._trials(environment, method, settings, about))
                    if settings is not None and found:
                        self._cells[kind, environment, method] = Cell(settings, found, worst)

    @property
    def environments(self) -> list[str]:
        """Those that methods were run in, in the suite's order."""
        return [name for name in self.about["environments"] if any(name == own for _, own, _ in self._cells)]

    @property
    def methods(self) -> list[str]:
        """Those that were run, in the order of the table of methods."""
        found = {method for _, _, method in self._cells}
        return sorted(found, key=table_order)

    def method(self, name: str) -> Mapping[str, Any]:
        """What is known of a method (`Contender.about`)."""
        return self._methods[name]

    def cell(self, kind: Kind, environment: str, method: str) -> Cell | None:
        """The trials of a method there, where there are some that the method can be judged by."""
        found = self._cells.get((kind, environment, method))
        return None if found is None or found.refused else found

    def primary(self, environment: str) -> PrimaryMetric:
        """What the scores are there."""
        return next(cell.primary for (_, own, _), cell in self._cells.items() if own == environment)

    def settings(self, kind: Kind, environment: str, method: str) -> str | None:
        """What it is run with there; None while that is not chosen yet."""
        about = self._methods[method]
        if kind == "default":
            return str(about["default"])
        if (environment, method) not in self._chosen:
            trials = self.about["tuning_trials"]
            self._chosen[environment, method] = choose(self._records, environment, method, about, trials)
        return self._chosen[environment, method]

    def tuning(self, environment: str, method: str) -> dict[str, float]:
        """What each setting reached on validation rows."""
        about = self._methods[method]
        return tuning_means(self._records, environment, method, about, self.about["tuning_trials"])

    def refusals(self) -> dict[tuple[str, str], str]:
        """Why a method cannot be run in an environment, by both."""
        return {(own, method): cell.refused for (_, own, method), cell in self._cells.items() if cell.refused}

    def target(self, kind: Kind, environment: str) -> float | None:
        """FedAvg's final mean score."""
        found = self.cell(kind, environment, REFERENCE)
        return None if found is None else fmean(found.finals)

    def gain(self, kind: Kind, environment: str, method: str, over: str = REFERENCE) -> Interval | None:
        """How much better than FedAvg, trial by trial."""
        found = self._differences(kind, environment, method, over)
        return interval(found) if found else None

    def scores(self, kind: Kind) -> tuple[list[dict[str, float]], list[str]]:
        """Final mean scores, greater is better, by environment, of the methods that have one in all of them; and the
        methods that have not."""
        whole = [m for m in self.methods if all(self.cell(kind, own, m) for own in self.environments)]
        found = []
        for environment in self.environments:
            sign = 1.0 if self.primary(environment).greater_is_better else -1.0
            cells = {method: self.cell(kind, environment, method) for method in whole}
            found.append({method: sign * fmean(cell.finals) for method, cell in cells.items() if cell is not None})
        return found, [method for method in self.methods if method not in whole]

    def ranking(self, kind: Kind) -> dict[str, Any] | None:
        """Mean ranks with Friedman's test and Nemenyi's critical difference; None for fewer than two methods."""
        scores, unranked = self.scores(kind)
        if not scores or len(scores[0]) < 2:
            return None
        tested = friedman(scores)
        return {
            "mean_ranks": mean_ranks(scores),
            "environments": len(scores),
            "friedman": None if tested is None else {"chi2": tested[0], "p": tested[1]},
            "critical_difference": critical_difference(len(scores[0]), len(scores)),
            "unranked": unranked,
        }

    def wins(self, kind: Kind) -> dict[str, dict[str, list[int]]]:
        """Of every pair in how many environments the first is better, neither, worse.

        In an environment all pairs are tested, by the paired t-test over the trials, corrected after Holm.
        """
        found = {a: {b: [0, 0, 0] for b in self.methods if b != a} for a in self.methods}
        for environment in self.environments:
            pairs = [
                (a, b, differences)
                for a, b in combinations(self.methods, 2)
                if (differences := self._differences(kind, environment, a, b))
            ]
            corrected = holm([paired_p(differences) for _, _, differences in pairs])
            for (a, b, differences), p in zip(pairs, corrected, strict=True):
                outcome = 1 if p > ALPHA else 0 if fmean(differences) > 0 else 2
                found[a][b][outcome] += 1
                found[b][a][2 - outcome] += 1
        return found

    def means(self, kind: Kind) -> dict[str, dict[str, list[int]]]:
        """Of every pair in how many environments the first's final mean score is better, and in how many worse."""
        found = {a: {b: [0, 0] for b in self.methods if b != a} for a in self.methods}
        for environment in self.environments:
            for a, b in combinations(self.methods, 2):
                differences = self._differences(kind, environment, a, b)
                gain = fmean(differences) if differences else 0.0
                if gain:
                    found[a][b][gain < 0] += 1
                    found[b][a][gain > 0] += 1
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values, without how long anything took: the same runs give the same bytes."""
        document: dict[str, Any] = {"suite": self.about["name"], "environments": {}}
        for environment in self.environments:
            primary = self.primary(environment)
            document["environments"][environment] = {
                "metric": primary.describe(),
                "target": {kind: self.target(kind, environment) for kind in KINDS},
                "methods": {method: self._of(environment, method) for method in self.methods},
            }
        document["left_out"] = {
            name: about["left_out"] for name, about in self.about["environments"].items() if about["left_out"]
        }
        document["ranking"] = {kind: self.ranking(kind) for kind in KINDS}
        document["wins_ties_losses"] = {kind: self.wins(kind) for kind in KINDS}
        document["better_worse"] = {kind: self.means(kind) for kind in KINDS}
        document["uses"] = {method: self._methods[method]["uses"] for method in self.methods}
        rounded: dict[str, Any] = _rounded(document)
        return rounded

    def _of(self, environment: str, method: str) -> dict[str, Any]:
        found: dict[str, Any] = {"tuning": self.tuning(environment, method)}
        if (reason := self.refusals().get((environment, method))) is not None:
            return {"refused": reason}
        for kind in KINDS:
            if (cell := self.cell(kind, environment, method)) is None:
                continue
            target, gain = self.target(kind, environment), self.gain(kind, environment, method)
            found[kind] = {
                "settings": cell.settings,
                "finals": cell.finals,
                "mean": fmean(cell.finals),
                "sd": stdev(cell.finals) if len(cell.finals) > 1 else 0.0,
                "area": fmean(cell.areas),
                "gain": None if gain is None else gain.as_json(),
                "diverged": cell.diverged,
                "rounds_to_target": None if target is None else cell.rounds_to(target),
                "megabytes_to_target": None if target is None else cell.megabytes_to(target),
                "megabytes": cell.megabytes,
                "clients": cell.clients,
                "curve": cell.curve,
                "ended": sorted({record.ended for record in cell.records if record.ended}),
                "warnings": sorted({line for record in cell.records for line in record.warnings}),
            }
        return found

    def _differences(self, kind: Kind, environment: str, method: str, over: str) -> list[float]:
        """How much better in each trial that both made."""
        mine, theirs = self.cell(kind, environment, method), self.cell(kind, environment, over)
        if mine is None or theirs is None:
            return []
        gain = mine.primary.gain
        return [gain(a, over=b) for a, b in zip(mine.finals, theirs.finals, strict=False)]

    def _trials(self, environment: str, method: str, settings: str, about: Mapping[str, Any]) -> Iterator[RunRecord]:
        """The trials that have a record, up to the first that has none."""
        described = about["described"][settings]
        for trial in count():
            found = self._records.find(environment, method, settings, f"{TRIAL}-{trial}", described)
            if found is None:
                return
            yield found

    def _worst(self, environment: str) -> float:
        """The score of a run that diverged."""
        known = [
            record
            for method, about in self._methods.items()
            for settings in about["described"]
            for record in self._trials(environment, method, settings, about)
        ]
        if not known or known[0].metric.greater_is_better:
            return 0.0
        return max((score for record in known for score in record.scores), default=0.0)


def _rounded(value: Any) -> Any:
    """The same with numbers of few digits, and None for what JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(entry) for entry in value]
    if isinstance(value, float | np.floating):
        return round(float(value), 4) if math.isfinite(value) else None
    return value

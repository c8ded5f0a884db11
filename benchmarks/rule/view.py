"""Records of a section as the tables need them: scores by federation and method, paired differences, the best rival."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.rule.entrants import RULE
from benchmarks.rule.records import Record
from fedunfold.studies.benchmark.statistics import Interval, interval


@dataclass(frozen=True)
class Bar:
    """Something that the rule is to reach.

    Attributes:
        text: What, with what was found.
        holds: Whether it does.
    """

    text: str
    holds: bool

    @property
    def line(self) -> str:
        return f"- {'Holds' if self.holds else '**Does not hold**'}: {self.text}"


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        title: Its heading.
        text: Markdown.
        bars: What is stated.
        numbers: The same in plain values.
    """

    title: str
    text: str
    bars: Sequence[Bar] = ()
    numbers: dict[str, Any] = field(default_factory=dict)


class View:
    """A section's runs.

    Args:
        records: Its records.
        last: Over how many last rounds a score is the mean.
    """

    def __init__(self, records: Iterable[Record], last: int) -> None:
        self.last = last
        self._runs: dict[tuple[str, str], dict[int, Record]] = {}
        for record in records:
            self._runs.setdefault((record.environment, record.method), {})[record.trial] = record

    @property
    def environments(self) -> list[str]:
        """Those with runs of the rule or of a rival."""
        return list(dict.fromkeys(environment for environment, _ in self._runs))

    def methods(self, environment: str) -> list[str]:
        """Those that were run there."""
        return [method for found, method in self._runs if found == environment]

    def records(self, environment: str, method: str) -> list[Record]:
        """The trials of a method, in their order."""
        return [record for _, record in sorted(self._runs.get((environment, method), {}).items())]

    def greater_is_better(self, environment: str) -> bool:
        return self.records(environment, self.methods(environment)[0])[0].greater_is_better

    def metric(self, environment: str) -> str:
        return self.records(environment, self.methods(environment)[0])[0].metric

    def digits(self, environment: str) -> int:
        """How many digits after the point its scores are shown with."""
        return 2 if self.metric(environment) == "accuracy" else 3

    def scores(self, environment: str, method: str) -> list[float]:
        """The score of every trial."""
        return [record.score(self.last) for record in self.records(environment, method)]

    def curve(self, environment: str, method: str) -> list[float]:
        """The mean over the trials after every round; a run that diverged counts 0."""
        records = self.records(environment, method)
        rounds = max(len(record.scores) for record in records)
        return [fmean((*r.scores, *[0.0] * rounds)[t] for r in records) for t in range(rounds)]

    def gains(
        self, environment: str, method: str, over: str, score: Callable[[Record], float] | None = None
    ) -> list[float]:
        """How much better a method is than another in each trial that both made."""
        value = score or (lambda record: record.score(self.last))
        mine, theirs = self._runs.get((environment, method), {}), self._runs.get((environment, over), {})
        sign = 1.0 if self.greater_is_better(environment) else -1.0
        return [sign * (value(mine[trial]) - value(theirs[trial])) for trial in sorted(mine.keys() & theirs.keys())]

    def best_rival(self, environment: str) -> str:
        """The method with the best mean score that is not the rule."""
        rivals = [method for method in self.methods(environment) if method != RULE]
        sign = 1.0 if self.greater_is_better(environment) else -1.0
        return max(rivals, key=lambda method: sign * fmean(self.scores(environment, method)))

    def against_best(self, environment: str) -> tuple[str, Interval] | None:
        """The best rival, and the rule's gain over it; None where either was not run."""
        if RULE not in self.methods(environment) or len(self.methods(environment)) < 2:
            return None
        rival = self.best_rival(environment)
        gains = self.gains(environment, RULE, rival)
        return (rival, interval(gains)) if gains else None


def in_order(found: Iterable[str], order: Iterable[str]) -> list[str]:
    """What was found, in a given order; others after it."""
    listed, known = list(dict.fromkeys(found)), list(order)
    return [name for name in known if name in listed] + [name for name in listed if name not in known]

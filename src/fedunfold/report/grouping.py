"""Runs of the same federation, put beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedunfold.runs.schema import FederationRecord, MethodRecord, RunRecord

BASELINE = "fedavg"


@dataclass(frozen=True, eq=False)
class Entry:
    """A method of a run, under a label that is its own in the group."""

    label: str
    run: RunRecord
    method: MethodRecord

    @property
    def learned(self) -> bool:
        return self.method.name in self.run.learned


@dataclass(frozen=True, eq=False)
class Group:
    """Runs whose numbers can be compared, because their federation is the same."""

    runs: tuple[RunRecord, ...]

    @property
    def name(self) -> str:
        return self.runs[0].environment

    @property
    def clients(self) -> tuple[str, ...]:
        return self.runs[0].clients

    @property
    def classes(self) -> tuple[str, ...]:
        return self.runs[0].classes

    @property
    def federation(self) -> FederationRecord | None:
        return self.runs[0].federation

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        several = len(self.runs) > 1
        return tuple(
            Entry(f"{method.name} · {run.label}" if several else method.name, run, method)
            for run in self.runs
            for method in run.methods
        )

    @cached_property
    def baseline(self) -> Entry | None:
        """What the others are held against: FedAvg, else the first that learned nothing; none for one alone."""
        if len(self.entries) < 2:
            return None
        plain = [entry for entry in self.entries if entry.method.name == BASELINE]
        plain += [entry for entry in self.entries if not entry.learned]
        return (plain or list(self.entries))[0]

    @property
    def others(self) -> tuple[Entry, ...]:
        """All but the baseline, learned ones first; the one alone where there is no baseline."""
        rest = [entry for entry in self.entries if entry is not self.baseline]
        return tuple(sorted(rest, key=lambda entry: not entry.learned))


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """By environment and digest; a run that does not say what its federation was stays alone."""
    found: dict[object, list[RunRecord]] = {}
    for run in runs:
        federation = run.federation
        found.setdefault((run.environment, federation.digest) if federation else run.label, []).append(run)
    return [Group(tuple(members)) for members in found.values()]

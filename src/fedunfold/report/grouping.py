"""Runs of the same federation, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedunfold.runs.schema import MethodRecord, RunRecord

BASELINE = "fedavg"


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledMethod(MethodRecord):
    """A method of a run in a group.

    Attributes:
        label: Its name, distinct in the group.
        run: The run.
    """

    label: str
    run: RunRecord

    @property
    def learned(self) -> bool:
        """Whether its weights were learned."""
        return self.name in self.run.learned


@dataclass(frozen=True, eq=False)
class Group:
    """Runs whose numbers can be compared, because their federation is the same.

    Attributes:
        runs: At least one.
    """

    runs: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        """What it says of environment, clients, classes and primary metric, all runs say."""
        return self.runs[0]

    @cached_property
    def methods(self) -> tuple[LabelledMethod, ...]:
        """All methods of all runs."""
        several = len(self.runs) > 1
        return tuple(
            LabelledMethod(
                label=f"{_label(method)} · {run.label}" if several else _label(method), run=run, **vars(method)
            )
            for run in self.runs
            for method in run.methods
        )

    @cached_property
    def baseline(self) -> LabelledMethod | None:
        """What the others are held against: FedAvg, else the first that learned nothing and is federated; none for one
        alone."""
        if len(self.methods) < 2:
            return None
        plain = [method for method in self.methods if method.name == BASELINE]
        plain += [method for method in self.methods if not (method.learned or method.is_reference)]
        return (plain or list(self.methods))[0]

    @property
    def others(self) -> tuple[LabelledMethod, ...]:
        """All but the baseline, learned ones first; the one alone where there is no baseline."""
        rest = [method for method in self.methods if method is not self.baseline]
        return tuple(sorted(rest, key=lambda method: not method.learned))


def _label(method: MethodRecord) -> str:
    return f"{method.name} (reference)" if method.is_reference else method.name


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs by environment and digest."""
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        found.setdefault((run.environment, run.federation.digest), []).append(run)
    return [Group(tuple(members)) for members in found.values()]

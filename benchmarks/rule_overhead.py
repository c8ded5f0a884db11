"""What a rule costs: rounds with it beside the same rounds with weights by size, absent clients treated alike.

The two take turns. What is counted is processor time, that of all threads of this process: other work on the machine
makes it longer by less than it makes a clock's.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.workload import BATCH_SIZE, CLASSES, FEATURES, HIDDEN, LR, TEST
from fedunfold.config import Environment, environment
from fedunfold.config.model import ModelSpec
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.messages import ClientUpdates
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.rule import Decided, State, WeightingRule
from fedunfold.rules.size import size
from fedunfold.runs.system_info import machine
from fedunfold.training.loop import run_rounds

Log = Callable[[str], None]
WIDTH = 64
CLIENTS, COHORT, SAMPLES = 100, 10, 600
ROUNDS: Mapping[str, int] = {"mnist-2": 4, f"{COHORT} of {CLIENTS}": 24}
"""How many rounds a run has, of which the later half counts: by then most clients are remembered."""
TREATMENTS: Sequence[Absent] = ("drop", "remember")


@dataclass(frozen=True)
class Overhead:
    """Processor seconds of a round, medians.

    Attributes:
        federation: Who trains.
        absent: How absent clients are treated.
        rule: The kind of rule.
        size: A round with weights by size.
        with_rule: The same with the rule.
        deciding: Of this, reading the round and deciding.
    """

    federation: str
    absent: Absent
    rule: Family
    size: float
    with_rule: float
    deciding: float

    @property
    def share(self) -> float:
        """What deciding adds to a round with weights by size."""
        return self.deciding / self.size


@dataclass(frozen=True)
class Overheads:
    """All that was measured."""

    machine: Mapping[str, Any]
    rows: Sequence[Overhead]

    def as_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": [asdict(row) | {"share": row.share} for row in self.rows]}


class _Timed:
    """A rule, and what its decisions take."""

    def __init__(self, rule: WeightingRule) -> None:
        self._rule = rule
        self.name, self.required_metrics = rule.name, rule.required_metrics
        self.seconds: list[float] = []

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Decided, State]:
        began = time.process_time()
        decided = self._rule(report, state)
        self.seconds.append(time.process_time() - began)
        return decided


def measure_overhead(families: Sequence[Family], repeats: int, log: Log = lambda what: None) -> Overheads:
    """Rounds under each kind of rule, in each federation."""
    rows = []
    for name, rounds in ROUNDS.items():
        federation = SimulatedFederation(_environment(name))
        for absent in TREATMENTS:
            for family in families:
                log(f"{family}, {name}, {absent}")
                rows.append(_overhead(federation, name, absent, family, rounds, repeats))
    return Overheads(machine(), rows)


def _overhead(
    federation: SimulatedFederation, name: str, absent: Absent, family: Family, rounds: int, repeats: int
) -> Overhead:
    rule = FAMILIES[family].initial(WIDTH, 0).with_horizon(rounds)
    found: dict[str, list[float]] = {"size": [], "with_rule": [], "deciding": []}
    for _ in range(repeats):
        sized, ruled = _Timed(size()), _Timed(rule)
        found["size"] += _seconds(federation, sized, rounds, absent)
        found["with_rule"] += _seconds(federation, ruled, rounds, absent)
        found["deciding"] += ruled.seconds[rounds // 2 :]
    return Overhead(name, absent, family, *(statistics.median(seconds) for seconds in found.values()))


def _seconds(federation: SimulatedFederation, rule: WeightingRule, rounds: int, absent: Absent) -> list[float]:
    """Of each round of the later half of a run."""
    marks: list[float] = []
    run_rounds(
        *(federation, rule, rounds),
        algorithm=Algorithm(absent=absent),
        on_round=lambda t, tests: marks.append(time.process_time()),
    )
    return [after - before for before, after in pairwise(marks)][rounds // 2 - 1 :]


def _environment(name: str) -> Environment:
    """A bundled environment, or random images of MNIST's shape on many clients of which few are sampled."""
    if name == "mnist-2":
        return environment(name)
    draw = np.random.default_rng(0)
    rows = CLIENTS * SAMPLES + TEST
    x, y = draw.random((rows, FEATURES), np.float32), draw.integers(0, CLASSES, rows)
    parts = [slice(TEST + k * SAMPLES, TEST + (k + 1) * SAMPLES) for k in range(CLIENTS)]
    return Environment.from_arrays(
        {f"client-{k}": (x[part], y[part]) for k, part in enumerate(parts)},
        (x[:TEST], y[:TEST]),
        rounds=ROUNDS[name],
        batch_size=BATCH_SIZE,
        lr=LR,
        model=ModelSpec(hidden=HIDDEN),
        classes=CLASSES,
        clients_per_round=COHORT,
        name="generated",
    )


def overhead_page(found: Overheads) -> str:
    """What was measured, in Markdown."""
    lines = [
        "# What a rule costs",
        "",
        "Processor time of a round, all threads together: medians of rounds with weights by size and with the rule in",
        "turn. *Deciding* is what the rule itself takes; the difference of the two rounds also has what it does to the",
        "rest of the round, and the noise of both.",
        "",
        "| federation | absent | rule | by size, ms | with the rule, ms | difference | deciding, ms | of a round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        sized, ruled, deciding = (f"{1000 * seconds:.1f}" for seconds in (row.size, row.with_rule, row.deciding))
        difference = f"{100 * (row.with_rule / row.size - 1):+.1f} %"
        measured = sized, ruled, difference, deciding, f"{100 * row.share:.1f} %"
        lines.append(f"| {' | '.join((row.federation, row.absent, row.rule, *measured))} |")
    return "\n".join(lines) + "\n"

"""What aggregation costs a Flower server: `WeightedStrategy` beside Flower's own `FedAvg`, on the same replies."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.subprocesses import check_memory_can_be_measured, run_python
from fedunfold.runs.system_info import machine

STRATEGIES = ("FedAvg", "size", "learned", "pre-trained, drop", "pre-trained")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Cost:
    """What a round's aggregation costs.

    Attributes:
        name: FedAvg, or the weights of a `WeightedStrategy`.
        seconds: A round, the median.
        least: The fastest.
        bytes: What the process grows by at most, with all that the strategy keeps between rounds.
    """

    name: str
    seconds: float
    least: float
    bytes: int


@dataclass(frozen=True)
class Costs:
    """All that was measured."""

    machine: Mapping[str, Any]
    clients: int
    entries: int
    rows: Sequence[Cost]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_strategies(clients: int, entries: int, repeats: int, log: Log = lambda what: None) -> Costs:
    """A round of each strategy, each in processes of its own, in turn."""
    check_memory_can_be_measured()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES}
    for _ in range(repeats):
        for name, runs in found.items():
            log(name)
            runs.append(json.loads(run_python("-m", "benchmarks.strategy_round", name, str(clients), str(entries))))
    rows = []
    for name, runs in found.items():
        seconds = [second for run in runs for second in run["seconds"]]
        memory = int(statistics.median(run["bytes"] for run in runs))
        rows.append(Cost(name, statistics.median(seconds), min(seconds), memory))
    return Costs(machine(), clients, entries, rows)


def strategies_page(found: Costs) -> str:
    """What was measured, in Markdown."""
    size = 4 * found.entries / 2**20
    lines = [
        "# What a strategy costs",
        "",
        f"Aggregation of {found.clients} replies of {found.entries / 1e6:g} M parameters, {size:.0f} MiB each, by",
        "Flower's `FedAvg` and by `WeightedStrategy` in its place, in processes of their own: median and fastest of",
        "the rounds after the first, and what a process grows by at most beyond the replies, with all that a strategy",
        "keeps between rounds. `FedAvg` keeps nothing; `WeightedStrategy` the model and the last direction, and the",
        "pre-trained rule, if absent clients are not dropped, the last update of every client.",
        "",
        "| weights | ms a round | fastest | times FedAvg's | MiB | times FedAvg's |",
        "|---|---|---|---|---|---|",
    ]
    theirs = found.rows[0]
    for row in found.rows:
        times = f"{1000 * row.seconds:.0f} | {1000 * row.least:.0f} | {row.seconds / theirs.seconds:.2f}"
        lines.append(f"| {row.name} | {times} | {row.bytes / 2**20:.0f} | {row.bytes / theirs.bytes:.2f} |")
    return "\n".join(lines) + "\n"

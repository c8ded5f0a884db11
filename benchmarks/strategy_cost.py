"""What aggregation costs a Flower server: `WeightedStrategy` beside Flower's own `FedAvg`, on the same replies."""

import json
import os
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
        processor: Processor seconds of a round, all threads together, the median: other work on the machine makes
            these longer by less than it makes a clock's.
        seconds: The fastest round by the clock.
        round: Bytes that the process grows by at most in a round.
        all: The same over all rounds, with what the strategy keeps between them.
        kept: Bytes that it is larger by after the last round, the model that the clients are sent included.
    """

    name: str
    processor: float
    seconds: float
    round: int
    all: int
    kept: int


@dataclass(frozen=True)
class Costs:
    """All that was measured.

    Attributes:
        machine: On which machine.
        load: How many processes wanted one of its cores, on average over the last minutes.
        repeats: How many processes each strategy had.
        clients: How many replies a round had.
        entries: Parameters of the model.
        rows: What each strategy took.
    """

    machine: Mapping[str, Any]
    load: float
    repeats: int
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
        processor, seconds = ([second for run in runs for second in run[key]] for key in ("processor", "seconds"))
        most = (int(statistics.median(run[key] for run in runs)) for key in ("round", "all", "kept"))
        rows.append(Cost(name, statistics.median(processor), min(seconds), *most))
    return Costs(machine(), os.getloadavg()[1], repeats, clients, entries, rows)


def strategies_page(found: Costs) -> str:
    """What was measured, in Markdown."""
    size = 4 * found.entries / 2**20
    lines = [
        "# What a strategy costs",
        "",
        f"Aggregation of {found.clients} replies of {found.entries / 1e6:g} M parameters, {size:.0f} MiB each, by",
        "Flower's `FedAvg` and by `WeightedStrategy` in its place, in processes of their own: the median processor",
        "time, and the fastest of the rounds after the first; and what a process grows by at most beyond the replies,",
        "in a round and over all of them. `WeightedStrategy` keeps the model between rounds. A pre-trained rule "
        "brings a",
        "server optimiser, which keeps a vector, and needs the last direction, the last two means of updates and the",
        "signs of its sketches, one vector each; where absent clients are remembered also one update of each client,",
        f"{found.clients} × {size:.0f} MiB here, of `remember_clients` = 1000 clients at most.",
        f"Each strategy had {found.repeats} processes of 5 rounds, on {found.machine['cores']} cores of which "
        f"{found.load:.1f} processes wanted one on average:",
        "other work on the machine shows in the times, by the clock more than of the processor, and hardly in the "
        "bytes.",
        "",
        "| weights | processor, ms | times FedAvg's | fastest, ms | times FedAvg's | MiB in a round | times FedAvg's "
        "| MiB in all | times FedAvg's | MiB kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    theirs = found.rows[0]
    for row in found.rows:
        times = f"{1000 * row.processor:.0f} | {row.processor / theirs.processor:.2f} | {1000 * row.seconds:.0f}"
        times += f" | {row.seconds / theirs.seconds:.2f}"
        memory = f"{row.round / 2**20:.0f} | {row.round / theirs.round:.2f} | {row.all / 2**20:.0f}"
        memory += f" | {row.all / theirs.all:.2f} | {row.kept / 2**20:.0f}"
        lines.append(f"| {row.name} | {times} | {memory} |")
    return "\n".join(lines) + "\n"

"""Federations of thousands of clients, of which some train in a round: seconds, memory and records as K grows.

Each case is `fedunfold run` on an environment file, in a process of its own: once for one round, and once for all of
them. The difference is what the rounds take.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedunfold.core.errors import FedunfoldError
from fedunfold.runs.system_info import machine
from fedunfold.studies.benchmark.markdown import table

Log = Callable[[str], None]
CLIENTS, ROUNDS, COHORT = (1_000, 10_000), 50, 100
METHODS = {"synchronous": "fedavg", "asynchronous": "fedbuff"}
ENVIRONMENT = """\
name = "many-clients"
rounds = {rounds}
batch_size = 10
lr = 0.05
clients_per_round = {cohort}

[clock]
speed_spread = 1.0
buffer = {cohort}

[model]
hidden = [30]

[data]
source = "{source}"

[partition]
kind = "dirichlet"
alpha = 0.3

[[clients]]
key = "site"
count = {clients}
epochs = 2
"""

PAGE = """\
# Many clients

Made by `python -m benchmarks many-clients`: `fedunfold run` of {rounds} rounds on {source}, divided by Dirichlet(0.3)
among so many clients, of which {cohort} train in a round, or at a time where rounds are asynchronous (`fedbuff`, whose
server makes a step from as many updates). The model is an MLP with 30 hidden units. Seconds are those of the whole
command: starting, reading and dividing the data, training, testing the final model on every client's data, and writing.
Set-up is the same with a single round.

{table}
All samples are in one array, of which every client has a range. The server holds the updates of those that train; only
`remember` keeps the last one of every client that ever did. Of more than 1,000 clients, a round's record has the
weights of those that took part.

Machine: {machine[device]}, {machine[cores]} cores, torch {machine[torch]}.
"""


@dataclass(frozen=True)
class Case:
    """One number of clients under one schedule.

    Attributes:
        schedule: Synchronous or asynchronous.
        clients: K.
        seconds: Of the whole command.
        setup: Of the same with a single round.
        peak: Bytes of the process at its largest.
        records: Bytes of the files that it left.
        accuracy: Of the last round, in percent.
    """

    schedule: str
    clients: int
    seconds: float
    setup: float
    peak: int
    records: int
    accuracy: float


@dataclass(frozen=True)
class ManyClients:
    """All that was measured."""

    machine: Mapping[str, Any]
    source: str
    rounds: int
    cohort: int
    cases: Sequence[Case]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "ManyClients":
        return cls(**{**record, "cases": [Case(**case) for case in record["cases"]]})


def measure_many_clients(
    log: Log, clients: Sequence[int] = CLIENTS, rounds: int = ROUNDS, cohort: int = COHORT, source: str = "mnist"
) -> ManyClients:
    """Every number of clients under both schedules."""
    cases = []
    for schedule, method in METHODS.items():
        for count in clients:
            log(f"{count} clients, {schedule}")
            settings = {"clients": count, "cohort": min(cohort, count), "source": source}
            setup = _run(ENVIRONMENT.format(rounds=1, **settings), method)[0]
            seconds, peak, records, accuracy = _run(ENVIRONMENT.format(rounds=rounds, **settings), method)
            cases.append(Case(schedule, count, seconds, setup, peak, records, accuracy))
    return ManyClients(machine(), source, rounds, cohort, cases)


def _run(text: str, method: str) -> tuple[float, int, int, float]:
    """Seconds, bytes of memory, bytes of files and the last accuracy of a run by the command line."""
    with TemporaryDirectory() as folder:
        file, out = Path(folder, "env.toml"), Path(folder, "out")
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "fedunfold", "run", str(file), "--method", method, "--out", str(out)]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise FedunfoldError(f"a run of the benchmark failed: {said.strip()[-2000:]}")
        seconds = time.perf_counter() - began
        last = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        return seconds, used.ru_maxrss * 1024, sum(found.stat().st_size for found in out.iterdir()), last["accuracy"]


def many_clients_page(found: ManyClients) -> str:
    """What was measured, in Markdown."""
    rows = [
        (
            case.schedule,
            f"{case.clients:,}",
            f"{case.seconds:.1f}",
            f"{case.setup:.1f}",
            f"{1000 * (case.seconds - case.setup) / (found.rounds - 1):.0f}",
            f"{case.peak / 2**20:.0f}",
            f"{case.records / 2**20:.1f}",
            f"{case.accuracy:.1f}",
        )
        for case in found.cases
    ]
    heads = ("rounds", "clients", "s", "of them set-up", "ms a round", "MiB at most", "MiB of records", "accuracy (%)")
    return PAGE.format(table=table(heads, rows), **vars(found))

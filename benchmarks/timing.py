"""Measuring in turn: every contender once, then all of them again, so that a busy moment hits all alike."""

import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import baselines, workload
from benchmarks.scaling import Scaling, scaling
from benchmarks.subprocesses import check_memory_can_be_measured, grown, run_program, run_python
from benchmarks.workload import outer_step, size_theta
from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.backends.cpu import is_built
from fedunfold.rules.size import size
from fedunfold.runs.system_info import machine
from fedunfold.training.loop import run_rounds

OTHER_ROUNDS = 8
DENSE = "engine, images without background"
ENVIRONMENTS: Mapping[str, Sequence[tuple[int, int]]] = {
    "computation-skew": workload.COMPUTATION_SKEW,
    "label-skew": workload.LABEL_SKEW,
}


@dataclass(frozen=True)
class Timed:
    """Seconds of something measured several times."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timed":
        return cls(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Bench:
    """All that was measured. Times are seconds, memory is bytes.

    `images` says what the data are. `round`: one round of the standard work by contender; `floor`: what its products
    take at the machine's best rate. `outer_step`: by environment and contender. `memory`: the growth of the process by
    one outer step.
    """

    machine: Mapping[str, Any]
    images: str
    multiplication_rate: float
    round: Mapping[str, Timed]
    floor: float
    outer_step: Mapping[str, Mapping[str, Timed]]
    memory: Mapping[str, int]
    scaling: Scaling
    start_up: Mapping[str, Timed]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Log = Callable[[str], None]


def measure(repeats: int, others: Mapping[str, str] | None = None, log: Log = lambda what: None) -> Bench:
    """The whole benchmark; `log` gets what is being measured. `others` are commands that do the standard work too."""
    check_memory_can_be_measured()
    log("rounds")
    env = workload.federation(workload.STANDARD)
    federation, dense = (
        SimulatedFederation(env),
        SimulatedFederation(workload.federation(workload.STANDARD, random=True)),
    )
    rates: list[float] = []

    def rate() -> None:
        rates.append(workload.multiplication_rate())

    contenders: dict[str, Callable[[], object]] = {
        "engine": lambda: run_rounds(federation, size(), env.rounds),
        DENSE: lambda: run_rounds(dense, size(), env.rounds),
        "plain loop": lambda: baselines.plain_loop(env),
        "rate": rate,
    }
    found = time_in_turn(contenders, repeats)
    rounds = {name: Timed.of([t / env.rounds for t in seconds]) for name, seconds in found.items() if name != "rate"}
    if find_spec("flwr") is not None:
        log("Flower's simulation")
        rounds |= _flower(repeats)
    for name, command in (others or {}).items():
        log(name)
        rounds[name] = other_simulator(name, command)
    outer = {}
    for name, shares in ENVIRONMENTS.items():
        log(f"outer steps, {name}")
        outer[name] = _outer_steps(workload.federation(shares), repeats)
    log("memory")
    memory = {name: _memory(name) for name in ("first_order", "exact", "unrolled")}
    log("scale")
    scaled = scaling()
    log("start-up")
    start_up = time_in_turn(
        {
            "--help": lambda: run_python("-m", "fedunfold", "--help"),
            "import": lambda: run_python("-c", "import fedunfold"),
        },
        repeats,
    )
    best = max(rates)
    return Bench(
        machine() | {"threads": torch.get_num_threads(), "compiled_backend": is_built()},
        workload.images(),
        best,
        rounds,
        workload.operations(workload.STANDARD) / best,
        outer,
        memory,
        scaled,
        {name: Timed.of(seconds) for name, seconds in start_up.items()},
    )


def time_in_turn(contenders: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every contender, in turn; the first time, which warms up, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            began = time.perf_counter()
            contender()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _outer_steps(env: Environment, repeats: int) -> dict[str, Timed]:
    federation = SimulatedFederation(env)
    theta = size_theta(env)
    contenders: dict[str, Callable[[], object]] = {
        "plain run": lambda: run_rounds(federation, size(), env.rounds),
        "first_order": lambda: outer_step(federation, theta, "first_order"),
        "exact": lambda: outer_step(federation, theta, "exact"),
        "unrolled": lambda: baselines.unrolled_step(env, theta),
    }
    return {name: Timed.of(seconds) for name, seconds in time_in_turn(contenders, repeats).items()}


def _memory(contender: str) -> int:
    """The growth of a process of its own by one outer step on the computation-skewed federation."""
    program = f"from benchmarks.timing import growth; print(growth({contender!r}))"
    return int(run_python("-c", program))


def growth(contender: str) -> int:
    """Bytes by which this process' largest size grows while it makes an outer step."""
    env = workload.federation(workload.COMPUTATION_SKEW)
    federation, theta = SimulatedFederation(env), size_theta(env)
    small = workload.federation([(100, 1)] * 2, rounds=1)
    baselines.unrolled_step(small, size_theta(small))  # loads what torch loads at first use
    if contender == "unrolled":
        return grown(lambda: baselines.unrolled_step(env, theta))
    return grown(lambda: outer_step(federation, theta, "exact" if contender == "exact" else "first_order"))


def _flower(repeats: int) -> dict[str, Timed]:
    """Flower's simulation under its own FedAvg, and with our strategy in its place."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seconds.json")
        run_python("-m", "benchmarks.flower_simulation", str(repeats), str(file))
        found = json.loads(file.read_text(encoding="utf-8"))
    return {f"flower simulation, {name}": Timed.of(seconds) for name, seconds in found.items()}


def other_simulator(name: str, command: str) -> Timed:
    """The seconds of its rounds that a command prints as the last line."""
    work = workload.described(workload.STANDARD, OTHER_ROUNDS)
    lines = run_program([*shlex.split(command), work]).strip().splitlines()
    try:
        seconds = [float(second) for second in json.loads(lines[-1])]
        return Timed.of(seconds)
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"{name} must print the seconds of its rounds as a JSON list, in the last line.") from error

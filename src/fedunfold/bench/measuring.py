"""Measuring side by side: every contender once, then all of them again, so that a busy moment hits all alike."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fedunfold.bench import baselines, work
from fedunfold.environments import Environment
from fedunfold.errors import FedunfoldError, InputError
from fedunfold.losses import OuterLoss
from fedunfold.machine import machine
from fedunfold.rounds import Algorithm, run_rounds
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from fedunfold.weighting.size import size

STATUS = Path("/proc/self/status")
ENVIRONMENTS: Mapping[str, Sequence[tuple[int, int]]] = {
    "computation-skew": work.COMPUTATION_SKEW,
    "label-skew": work.LABEL_SKEW,
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

    `round`: one round of the standard work by contender; `floor`: what its products take at the machine's best rate.
    `outer_step`: by environment and contender. `memory`: the growth of the process by one outer step.
    """

    machine: Mapping[str, Any]
    multiplication_rate: float
    round: Mapping[str, Timed]
    floor: float
    outer_step: Mapping[str, Mapping[str, Timed]]
    memory: Mapping[str, int]
    start_up: Mapping[str, Timed]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Say = Callable[[str], None]


def measure(repeats: int, say: Say = lambda what: None) -> Bench:
    """The whole bench; `say` hears what is being measured."""
    if not STATUS.exists():
        raise InputError(f"the bench measures memory by {STATUS}, which only Linux has.")
    say("rounds")
    env = work.made_up(work.STANDARD)
    federation, rates = SimulatedFederation(env), []

    def rate() -> None:
        rates.append(work.multiplication_rate())

    contenders: dict[str, Callable[[], object]] = {
        "engine": lambda: run_rounds(federation, size(), env.rounds),
        "plain loop": lambda: baselines.plain_loop(env),
        "rate": rate,
    }
    found = side_by_side(contenders, repeats)
    rounds = {
        name: Timed.of([t / env.rounds for t in seconds])
        for name, seconds in found.items()
        if name in ("engine", "plain loop")
    }
    if find_spec("flwr") is not None:
        say("Flower's simulation")
        rounds |= _flower(repeats)
    outer = {}
    for name, shares in ENVIRONMENTS.items():
        say(f"outer steps, {name}")
        outer[name] = _outer_steps(work.made_up(shares), repeats)
    say("memory")
    memory = {name: _memory(name) for name in ("first_order", "exact", "unrolled")}
    say("start-up")
    start_up = side_by_side(
        {
            "--help": lambda: _python("-m", "fedunfold", "--help"),
            "import": lambda: _python("-c", "import fedunfold"),
        },
        repeats,
    )
    best = max(rates)
    return Bench(
        machine() | {"threads": torch.get_num_threads()},
        best,
        rounds,
        work.operations(work.STANDARD) / best,
        outer,
        memory,
        {name: Timed.of(seconds) for name, seconds in start_up.items()},
    )


def side_by_side(contenders: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
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
    theta = _theta(env)
    contenders: dict[str, Callable[[], object]] = {
        "plain run": lambda: run_rounds(federation, size(), env.rounds),
        "first_order": lambda: _unfold(federation, theta, "first_order"),
        "exact": lambda: _unfold(federation, theta, "exact"),
        "unrolled": lambda: baselines.unrolled_step(env, theta),
    }
    return {name: Timed.of(seconds) for name, seconds in side_by_side(contenders, repeats).items()}


def _unfold(federation: SimulatedFederation, theta: torch.Tensor, adjoint: AdjointKind) -> None:
    start = federation.initial_model("learn-0")
    unfold(federation, theta, Algorithm(), OuterLoss(), adjoint, run="learn-0", model=start)


def _theta(env: Environment) -> torch.Tensor:
    sizes = torch.tensor(env.load().sizes, dtype=torch.float64)
    return (sizes / sizes.sum()).sqrt().expand(env.rounds, -1).clone()


def _memory(contender: str) -> int:
    """The growth of a process of its own by one outer step on the computation-skewed federation."""
    program = f"from fedunfold.bench.measuring import growth; print(growth({contender!r}))"
    return int(_python("-c", program))


def growth(contender: str) -> int:
    """Bytes by which this process' largest size grows while it makes an outer step."""
    env = work.made_up(work.COMPUTATION_SKEW)
    federation, theta = SimulatedFederation(env), _theta(env)
    small = work.made_up([(100, 1)] * 2, rounds=1)
    baselines.unrolled_step(small, _theta(small))  # loads what torch loads at first use
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is now the present one
    if contender == "unrolled":
        baselines.unrolled_step(env, theta)
    else:
        _unfold(federation, theta, "exact" if contender == "exact" else "first_order")
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Bytes of this process in memory: at present (VmRSS), or at most (VmHWM)."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _flower(repeats: int) -> dict[str, Timed]:
    """Flower's simulation under its own FedAvg, and with our strategy in its place."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seconds.json")
        _python("-m", "fedunfold.bench.flower_simulation", str(repeats), str(file))
        found = json.loads(file.read_text(encoding="utf-8"))
    return {f"flower simulation, {name}": Timed.of(seconds) for name, seconds in found.items()}


def _python(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True)
    if ended.returncode:
        raise FedunfoldError(f"a program of the bench failed: {ended.stderr.strip()[-2000:]}")
    return ended.stdout

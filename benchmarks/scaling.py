"""How the cost of a learning grows with clients, rounds, local steps and parameters: seconds and memory of one step.

Every point is measured in a process of its own, with one thread. The federation is a linear head over made-up
features; one thing at a time is made larger.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.subprocesses import grown, resident, run_python
from benchmarks.workload import outer_step, size_theta
from fedunfold.config import Environment
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.unfolding.update_store import UpdateStorage

SAMPLES, BATCH_SIZE, CLASSES = 60, 20, 100


@dataclass(frozen=True)
class Size:
    """A federation: clients (`clients_per_round` of them in a round, or all), rounds, epochs, features."""

    clients: int = 10
    rounds: int = 10
    epochs: int = 1
    features: int = 240
    clients_per_round: int | None = None

    @property
    def parameters(self) -> int:
        return CLASSES * (self.features + 1)

    @property
    def local_steps(self) -> int:
        return self.epochs * -(-SAMPLES // BATCH_SIZE)


@dataclass(frozen=True)
class Point:
    """What one outer step took: seconds, the growth of the process by it, and the process at its largest, in bytes;
    and the relative error of its gradient by the tape that the updates were kept on."""

    size: Size
    seconds: float
    growth: int
    peak: int
    error: float


AXES: Mapping[str, tuple[str, tuple[Size, ...]]] = {
    "clients": ("clients", tuple(Size(clients=k) for k in (5, 20, 100, 300, 1000))),
    "rounds": ("rounds", tuple(Size(rounds=t) for t in (10, 25, 50, 100, 200))),
    "local steps": ("local_steps", tuple(Size(epochs=e) for e in (2, 8, 32, 64))),
    "parameters": ("parameters", tuple(Size(clients=100, features=f) for f in (60, 240, 960, 3840))),
}
LARGE = Size(clients=1000, rounds=100, clients_per_round=50)
LONG_TAPE = Size(clients=100, rounds=50)


@dataclass(frozen=True)
class Scaling:
    """The points along every axis, one large federation of which few clients are there in a round, and one by every
    tape."""

    axes: Mapping[str, tuple[Point, ...]]
    large: Point
    tapes: Mapping[UpdateStorage, Point]

    def along(self, axis: str) -> list[int]:
        """The values of what is varied."""
        return [getattr(point.size, AXES[axis][0]) for point in self.axes[axis]]

    def slope(self, axis: str, of: str = "seconds") -> float:
        """Fitted on logarithmic axes: 1 where twice as much takes twice as long."""
        values = [getattr(point, of) for point in self.axes[axis]]
        return float(np.polyfit(np.log(self.along(axis)), np.log(values), 1)[0])


def scaling() -> Scaling:
    """All of it; a few minutes."""
    axes = {axis: tuple(_measured(size) for size in sizes) for axis, (_, sizes) in AXES.items()}
    tapes: dict[UpdateStorage, Point] = {tape: _measured(LONG_TAPE, tape) for tape in get_args(UpdateStorage)}
    return Scaling(axes, _measured(LARGE), tapes)


def _measured(size: Size, tape: UpdateStorage = "full") -> Point:
    program = f"from benchmarks.scaling import Size, said; print(said({size!r}, {tape!r}))"
    return Point(size, **json.loads(run_python("-c", program)))


def said(size: Size, tape: UpdateStorage) -> str:
    """A point measured in this process, as JSON."""
    torch.set_num_threads(1)  # how many threads a step is worth would bend the curve
    small = replace(size, clients=2, rounds=1, epochs=1, clients_per_round=None)
    _step(_federation(small), tape)  # loads what torch loads at first use
    federation, gradients = _federation(size), []
    began = time.perf_counter()
    growth = grown(lambda: gradients.append(_step(federation, tape)))
    found = {"seconds": time.perf_counter() - began, "growth": growth, "peak": resident("VmHWM"), "error": 0.0}
    if tape != "full":
        full = _step(federation, "full")
        found["error"] = float((gradients[0] - full).norm() / full.norm())
    return json.dumps(found)


def _step(federation: SimulatedFederation, tape: UpdateStorage) -> Tensor:
    return outer_step(federation, size_theta(federation.environment), "first_order", tape)


def _federation(size: Size) -> SimulatedFederation:
    draw = np.random.default_rng(0)

    def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
        return draw.random((n, size.features), dtype=np.float32), draw.integers(0, CLASSES, n)

    env = Environment.from_arrays(
        {f"client-{k}": rows(SAMPLES) for k in range(size.clients)},
        rows(100),
        rounds=size.rounds,
        batch_size=BATCH_SIZE,
        lr=0.01,
        epochs=size.epochs,
        classes=CLASSES,
        clients_per_round=size.clients_per_round,
        name="made-up",
    )
    return SimulatedFederation(env)

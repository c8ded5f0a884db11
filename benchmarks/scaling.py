"""How the cost of learning grows with clients, rounds, local steps and parameters: seconds and memory of one step.

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
    and the relative error of its gradient where the updates are stored otherwise than in full."""

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
MANY_UPDATES = Size(clients=100, rounds=50)


@dataclass(frozen=True)
class Scaling:
    """The points along every axis, one large federation of which few clients train in a round, and one with updates
    stored in every way."""

    axes: Mapping[str, tuple[Point, ...]]
    large: Point
    storages: Mapping[UpdateStorage, Point]

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
    storages: dict[UpdateStorage, Point] = {kind: _measured(MANY_UPDATES, kind) for kind in get_args(UpdateStorage)}
    return Scaling(axes, _measured(LARGE), storages)


def _measured(size: Size, storage: UpdateStorage = "full") -> Point:
    program = f"from benchmarks.scaling import Size, measure_here; print(measure_here({size!r}, {storage!r}))"
    return Point(size, **json.loads(run_python("-c", program)))


def measure_here(size: Size, storage: UpdateStorage) -> str:
    """A point measured in this process, as JSON."""
    torch.set_num_threads(1)  # how many threads a step is worth would bend the curve
    small = replace(size, clients=2, rounds=1, epochs=1, clients_per_round=None)
    _step(_federation(small), storage)  # loads what torch loads at first use
    federation, gradients = _federation(size), []
    began = time.perf_counter()
    growth = grown(lambda: gradients.append(_step(federation, storage)))
    found = {"seconds": time.perf_counter() - began, "growth": growth, "peak": resident("VmHWM"), "error": 0.0}
    if storage != "full":
        full = _step(federation, "full")
        found["error"] = float((gradients[0] - full).norm() / full.norm())
    return json.dumps(found)


def _step(federation: SimulatedFederation, storage: UpdateStorage) -> Tensor:
    return outer_step(federation, size_theta(federation.environment), "first_order", storage)


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

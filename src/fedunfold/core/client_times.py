"""How long clients take to train, in simulated seconds: drawn, or read from a trace.

The n-th training of client k in a run takes

    s τ_k exp(σ z_k + ρ z_{k,n}) + D e_{k,n}                 z normal, e exponential with mean 1

with τ_k local steps of s seconds, σ the spread of the clients' speeds, ρ that of one client's trainings, and D the mean
delay of the network. z and e are pure functions of (seed, run, client, n). A trace takes the place of all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedunfold.core import rng
from fedunfold.core.errors import InputError

Trainings = tuple[tuple[float, bool], ...]
"""Of each training of a client how many seconds it takes, and whether its update is lost; the last is followed by the
first again."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClientTimes:
    """How long the clients of a federation take.

    Attributes:
        client_ids: All K of them.
        num_steps: τ_k in round t, of (k, t).
        probabilities: How likely the update of a training arrives, [K].
        seed: The environment's.
        seconds_per_step: s.
        speed_spread: σ.
        jitter: ρ.
        delay: D.
        trace: Trainings by client id, in the place of what is drawn.

    >>> times = ClientTimes(("ann", "bob"), lambda k, t: 10, (1.0, 1.0), seconds_per_step=0.5)
    >>> times.seconds("trial-0", 0, 0, 0)
    5.0
    """

    client_ids: tuple[str, ...]
    num_steps: Callable[[int, int], int]
    probabilities: tuple[float, ...]
    seed: int = 0
    seconds_per_step: float = 1.0
    speed_spread: float = 0.0
    jitter: float = 0.0
    delay: float = 0.0
    trace: Mapping[str, Trainings] = field(default_factory=dict)
    _slowness: dict[str, Floats] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.trace and (missing := [key for key in self.client_ids if key not in self.trace]):
            raise InputError(f"the trace of the clock has no row for client '{missing[0]}'; give every client one.")

    def seconds(self, run: str, k: int, n: int, t: int) -> float:
        """How long the n-th training of client k takes, from 0, with the epochs of round t."""
        key = self.client_ids[k]
        if self.trace:
            return self._traced(key, n)[0]
        slowness = float(self._slowness_of(run)[k])
        if self.jitter:
            slowness *= float(np.exp(self.jitter * _normals(self.seed, "jitter", (run, n), [key])[0]))
        waited = 0.0
        if self.delay:
            waited = self.delay * float(-np.log1p(-rng.uniforms(self.seed, "delay", (run, n), [key])[0]))
        return self.seconds_per_step * self.num_steps(k, t) * slowness + waited

    def arrives(self, run: str, k: int, n: int) -> bool:
        """Whether the update of its n-th training reaches the server."""
        key, likely = self.client_ids[k], self.probabilities[k]
        if self.trace and self._traced(key, n)[1]:
            return False
        return likely >= 1 or bool(rng.uniforms(self.seed, "arrival", (run, n), [key])[0] < likely)

    def reachable(self, t: int) -> NDArray[np.float64]:
        """How likely the update of a training of round t arrives, [K]: 0 where the trace says that it is lost."""
        lost = [bool(self.trace) and self._traced(key, t)[1] for key in self.client_ids]
        return np.where(lost, 0.0, self.probabilities)

    @property
    def ever_arriving(self) -> int:
        """How many clients have updates that can arrive."""
        kept = (not self.trace or not all(lost for _, lost in self.trace[key]) for key in self.client_ids)
        return sum(likely > 0 and some for likely, some in zip(self.probabilities, kept, strict=True))

    def _traced(self, key: str, n: int) -> tuple[float, bool]:
        found = self.trace[key]
        return found[n % len(found)]

    def _slowness_of(self, run: str) -> Floats:
        """exp(σ z_k) of all clients."""
        if run not in self._slowness:
            drawn = np.ones(len(self.client_ids))
            if self.speed_spread:
                drawn = np.exp(self.speed_spread * _normals(self.seed, "speed", (run,), self.client_ids))
            self._slowness[run] = drawn
        return self._slowness[run]


def by_client(rows: Sequence[tuple[str, float, bool]]) -> dict[str, Trainings]:
    """(client, seconds, lost) of trainings in their order as a trace."""
    found: dict[str, list[tuple[float, bool]]] = {}
    for key, seconds, lost in rows:
        found.setdefault(key, []).append((seconds, lost))
    return {key: tuple(trainings) for key, trainings in found.items()}


def _normals(seed: int, purpose: str, parts: Sequence[str | int], client_ids: Sequence[str]) -> Floats:
    uniform = rng.uniforms(seed, purpose, parts, client_ids) + 2.0**-54  # above 0, where the quantile is infinite
    found: Floats = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
    return found

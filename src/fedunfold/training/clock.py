"""When updates reach the server: in the round they were trained in, or later, in asynchronous rounds.

A synchronous round lasts as long as the slowest client that takes part in it; where nobody does, as long as the slowest
of those who were asked. In asynchronous rounds (`core.timetable`), whoever begins with model t trains in the engine's
round t, and their updates are held back until the step that gets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.config.clock import Clock as ClockSettings
from fedunfold.config.clock import client_times
from fedunfold.core import rng
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.client_times import ClientTimes
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientMetrics, ClientUpdates, Metric, OpenUpdates
from fedunfold.core.participation import Participation
from fedunfold.core.timetable import ServerStep, timetable
from fedunfold.data.federated import FederatedData

BY_CLIENT = tuple(name for name in get_args(Metric) if name != "gradients")
"""Metrics that are a number for each client."""


@dataclass(frozen=True)
class Arrived:
    """What a server step is made from.

    Attributes:
        report: The updates; who is not in it counts as absent, if it is of the cohort.
        state: What the clock remembers, made of numbers, strings, tensors, lists and dicts.
        time: When the step is made, in simulated seconds from the beginning; None where there is no time.
    """

    report: ClientUpdates
    state: Any
    time: float | None = None


class Clock(Protocol):
    """What the loop over rounds asks; no state is None before the first round."""

    def participation(self, run: str, t: int) -> Participation | None:
        """Who trains model t; None where they are drawn."""

    def arrive(self, run: str, report: ClientUpdates, state: Any) -> Arrived:
        """What server step t is made from, where `report` is of those who trained model t."""

    @property
    def limit(self) -> float | None:
        """The time from which no further step is made."""

    def describe(self) -> Any:
        """Plain values that stand for it in a checkpoint."""


@dataclass(frozen=True)
class SynchronousClock:
    """Every round waits for its slowest client.

    Attributes:
        times: How long they take.
        limit: The time from which no further round is made.
    """

    times: ClientTimes
    limit: float | None = None

    def participation(self, run: str, t: int) -> None:
        return None

    def arrive(self, run: str, report: ClientUpdates, state: Any) -> Arrived:
        trained = report.participated.clone()
        for key in report.rejected:
            trained[report.client_ids.index(key)] = True
        waited = trained if bool(trained.any()) else report.cohort
        clients, t = torch.nonzero(waited).flatten().tolist(), report.round
        time = float(state or 0.0) + max(self.times.seconds(run, k, t, t) for k in clients)
        return Arrived(report, time, time)

    def describe(self) -> Any:
        return [*_described(self.times), self.limit]


@dataclass(frozen=True)
class AsynchronousClock:
    """The server makes a step from every c updates.

    Attributes:
        times: How long clients take, and whose updates are lost.
        rounds: How many steps there are.
        concurrency: C, how many clients train at a time.
        buffer: c.
        limit: The time from which no further step is made.
    """

    times: ClientTimes
    rounds: int
    concurrency: int
    buffer: int
    limit: float | None = None
    _settled: dict[str, tuple[list[ServerStep], list[list[int]]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.buffer > (arriving := self.times.ever_arriving):
            raise InputError(
                f"field clock.buffer: the server waits for the updates of {self.buffer} clients, and those of "
                f"{arriving} can arrive; make it smaller."
            )

    def steps(self, run: str) -> list[ServerStep]:
        """The server's steps in a run."""
        return self._settle(run)[0]

    def _settle(self, run: str) -> tuple[list[ServerStep], list[list[int]]]:
        """The server's steps, and who begins with each model and has an update in one of the steps."""
        if run not in self._settled:
            times, ids = self.times, self.times.client_ids

            def order(t: int) -> Sequence[int]:
                drawn: list[int] = np.argsort(
                    rng.uniforms(times.seed, "sampling", (run, t), ids), kind="stable"
                ).tolist()
                return drawn

            def training(k: int, n: int, t: int) -> tuple[float, bool]:
                return times.seconds(run, k, n, t), times.arrives(run, k, n)

            found = timetable(self.rounds, len(ids), self.concurrency, self.buffer, order, training)
            begin: list[list[int]] = [[] for _ in found]
            for step in found:
                for k, version in zip(step.clients, step.versions, strict=True):
                    begin[version].append(k)
            self._settled[run] = found, begin
        return self._settled[run]

    def participation(self, run: str, t: int) -> Participation:
        """Those who begin with model t and whose updates enter one of the steps."""
        begin = np.zeros(len(self.times.client_ids), dtype=bool)
        begin[self._settle(run)[1][t]] = True
        return Participation(begin, begin)

    def arrive(self, run: str, report: ClientUpdates, state: Any) -> Arrived:
        t, step = report.round, self.steps(run)[report.round]
        on_their_way = _joined(state, _trained(report))
        clients, due = on_their_way["clients"], torch.zeros(len(report.client_ids), dtype=torch.bool)
        due[list(step.clients)] = True
        arriving = due[clients]
        held = {name: values[~arriving.to(values.device)] for name, values in on_their_way.items()}
        found = {name: values[arriving.to(values.device)] for name, values in on_their_way.items()}
        order = found["clients"].argsort()
        found = {name: values[order.to(values.device)] for name, values in found.items()}
        staleness = torch.zeros(len(due), dtype=torch.long)
        staleness[list(step.clients)] = t - torch.tensor(step.versions)
        return Arrived(_report(report, found, due, staleness), held, step.time)

    def describe(self) -> Any:
        return [*_described(self.times), self.rounds, self.concurrency, self.buffer, self.limit]


def clock_for(
    environment: Environment, data: FederatedData, algorithm: Algorithm, rounds: int
) -> SynchronousClock | AsynchronousClock | None:
    """The clock of a run; None where rounds are synchronous and the environment has no clock.

    Args:
        environment: Whose clients train.
        data: Their data.
        algorithm: Whether rounds are synchronous.
        rounds: T.
    """
    settings, times = environment.clock or ClockSettings(), client_times(environment, data)
    if algorithm.schedule == "synchronous":
        return None if environment.clock is None else SynchronousClock(times, settings.limit)
    if environment.client_sampler != "uniform":
        raise InputError(
            f"client sampler '{environment.client_sampler}' draws the clients of a round, and asynchronous rounds have "
            "none; take the sampler uniform."
        )
    clients = len(data.keys)
    concurrency = min(clients, settings.concurrency or environment.clients_per_round or clients)
    return AsynchronousClock(times, rounds, concurrency, settings.buffer or max(1, concurrency // 10), settings.limit)


def _described(times: ClientTimes) -> list[Any]:
    drawn = [times.seed, times.seconds_per_step, times.speed_spread, times.jitter, times.delay]
    return [*drawn, {key: list(map(list, trainings)) for key, trainings in times.trace.items()}]


def _trained(report: ClientUpdates) -> dict[str, Tensor]:
    """What the clients of a round sent, a row each."""
    updates = report.updates
    if not isinstance(updates, OpenUpdates):
        raise InputError("asynchronous rounds hold updates back, which secure sums do not reveal; run without these.")
    clients, metrics = updates.clients, report.metrics
    sent = {"clients": clients, "rows": updates.rows, "steps": report.num_steps[clients]}
    if updates.norms is not None:
        sent["norms"] = updates.norms
    sent |= {
        name: values[clients.to(values.device)] for name in BY_CLIENT if (values := getattr(metrics, name)) is not None
    }
    return sent if metrics.gradients is None else sent | {"gradients": metrics.gradients}


def _joined(held: dict[str, Tensor] | None, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is on its way; a round in which nobody trains has no norms."""
    if held is None or not len(held["clients"]):
        return sent
    if not len(sent["clients"]):
        return held
    return {name: torch.cat([held[name].to(values.device), values]) for name, values in sent.items()}


def _report(trained: ClientUpdates, found: dict[str, Tensor], due: Tensor, staleness: Tensor) -> ClientUpdates:
    """A server step's report, from what has arrived of those whose updates are due."""
    clients, num_clients = found["clients"], len(due)

    def spread(values: Tensor, missing: float) -> Tensor:
        whole = values.new_full((num_clients,), missing)
        whole[clients.to(values.device)] = values
        return whole

    numbers = {name: spread(found[name], torch.nan) for name in BY_CLIENT if name in found}
    return replace(
        trained,
        participated=spread(torch.ones(len(clients), dtype=torch.bool), 0),
        num_steps=spread(found["steps"], 0),
        updates=OpenUpdates(clients, found["rows"], found.get("norms")),
        cohort=due,
        metrics=ClientMetrics(**numbers, gradients=found.get("gradients")),
        staleness=staleness,
    )

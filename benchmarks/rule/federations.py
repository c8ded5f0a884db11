"""The federations of each section, made anew from their names wherever a run needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import fedunfold as fu
from benchmarks.held_out import ORDER, Boxes, held_out, loaded
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, OpenUpdates, TrainRequest
from fedunfold.core.rng import generator
from fedunfold.data.federated import FederatedData
from fedunfold.data.partitions import DirichletPartition
from fedunfold.data.sources import Dataset, load_mnist
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.pretraining.distribution import Distribution
from fedunfold.studies.attacks import Attack

LEAST_ROWS = 2
"""A client that a Dirichlet draw gives fewer rows gets some of the largest client's."""
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Built:
    """A federation to run methods in.

    Attributes:
        federation: It.
        knows_horizon: Whether a rule is told T.
        about: What a record says of it.
    """

    federation: SimulatedFederation
    knows_horizon: bool = True
    about: dict[str, Any] = field(default_factory=dict)


class Cohorts(NamedTuple):
    """How many clients there are, how many are sampled for a round, and T."""

    clients: int
    sampled: int
    rounds: int


DIRICHLET = {"mnist-100-clients": Cohorts(100, 10, 50), "mnist-1000-clients": Cohorts(1000, 20, 100)}
BAD_DATA = ("mnist", "fashion-mnist", "boxes")
BAD_KINDS = ("labels", "inputs", "updates")


def federation(section: str, environment: str, trial: int) -> Built:
    """The federation of that name; only those of `dirichlet` are others in every trial."""
    return _built(section, environment, trial if section == "dirichlet" else 0)


@lru_cache(maxsize=2)
def _built(section: str, environment: str, trial: int) -> Built:
    return BUILDERS[section](environment, trial)


def _bundled(environment: str, trial: int) -> Built:
    return Built(SimulatedFederation(fu.environment(environment)))


def _drawn(environment: str, trial: int) -> Built:
    purpose, _, number = environment.rpartition("-")
    drawn = Distribution().draw(int(number), purpose)
    return Built(SimulatedFederation(drawn.environment), drawn.knows_horizon)


def _foreign(environment: str, trial: int) -> Built:
    data, env = held_out(int(environment.rpartition("-")[2]))
    return Built(SimulatedFederation(env), about={"data": data, "test_rows": len(env.load().y_test)})


def _dirichlet(environment: str, trial: int) -> Built:
    clients, sampled, rounds = DIRICHLET[environment]
    data = _mnist()
    rng = generator(0, "benchmarks", environment, trial)
    parts = with_least_rows(DirichletPartition(alpha=0.1).split(data.y_train, clients, rng), rng)
    env = fu.Environment.from_arrays(
        {f"client-{k}": (data.x_train[part], data.y_train[part]) for k, part in enumerate(parts)},
        (data.x_test, data.y_test),
        name=environment,
        epochs=2,
        model=(128, 128),
        rounds=rounds,
        batch_size=50,
        lr=0.01,
        clients_per_round=sampled,
    )
    return Built(SimulatedFederation(env), about={"smallest_client": min(map(len, parts))})


def with_least_rows(parts: Sequence[Indices], rng: np.random.Generator, least: int = LEAST_ROWS) -> list[Indices]:
    """The same parts, in which the smallest got rows of the largest until none has fewer."""
    found = list(parts)
    for k in range(len(found)):
        while len(found[k]) < least:
            largest = max(range(len(found)), key=lambda j: len(found[j]))
            given = int(rng.integers(len(found[largest])))
            found[k] = np.append(found[k], found[largest][given])
            found[largest] = np.delete(found[largest], given)
    return found


def _bad_clients(environment: str, trial: int) -> Built:
    data, kind, bad = environment.rsplit("-", 2)
    env = _ten_clients(data)
    clean, attack = env.load(), Attack("flip", int(bad))
    if kind == "labels":
        return Built(SimulatedFederation(env, attack.spoiled(clean)))
    if kind == "inputs":
        return Built(SimulatedFederation(env, with_noise(clean, int(bad))))
    return Built(ReversingFederation(env, reversing=attack.clients(clean.keys)))


def with_noise(data: FederatedData, bad: int) -> FederatedData:
    """The data, in which the last clients' inputs are noise with the mean and deviation of each feature."""
    first = data.offsets[len(data.keys) - bad]
    own = data.x[first:].numpy()
    rng = generator(0, "benchmarks", "noise", bad)
    noise = rng.normal(own.mean(0), own.std(0) + 1e-6, own.shape).astype(np.float32)
    return replace(data, inputs=torch.cat([data.x[:first], torch.from_numpy(noise)]))


class ReversingFederation(SimulatedFederation):
    """A simulation in which some clients send their update with the sign reversed.

    Args:
        environment: The environment.
        reversing: Those that do.
    """

    def __init__(self, environment: fu.Environment, *, reversing: Sequence[str]) -> None:
        super().__init__(environment)
        self._reversing = frozenset(reversing)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        return [self._reversed(report) for report in super().train(requests)]

    def _reversed(self, report: ClientUpdates) -> ClientUpdates:
        clients = report.updates.clients
        signs = [-1.0 if report.client_ids[k] in self._reversing else 1.0 for k in clients.tolist()]
        rows = report.updates.rows * torch.tensor(signs).to(report.updates.rows)[:, None]
        return replace(report, updates=OpenUpdates(clients, rows))


@cache
def _ten_clients(data: str) -> fu.Environment:
    """Ten clients with unlike shares of the classes, 300 rows each on average."""
    rng = generator(0, "benchmarks", "bad-clients", data)
    if data == "boxes":
        boxes = Boxes.draw(rng, 6, 20)
        found = Dataset(*boxes.sample(rng, 3000), *boxes.sample(rng, 2000))
    else:
        found = _mnist() if data == "mnist" else loaded(data)
    rows = rng.permutation(len(found.y_train))[:3000]
    tested = rng.permutation(len(found.y_test))[:2000]
    x, y = found.x_train[rows], found.y_train[rows]
    parts = with_least_rows(DirichletPartition(alpha=0.5).split(y, 10, rng), rng)
    return fu.Environment.from_arrays(
        {f"client-{k}": (x[part], y[part]) for k, part in enumerate(parts)},
        (found.x_test[tested], found.y_test[tested]),
        name=f"ten-clients-{data}",
        epochs=2,
        model=(32,),
        rounds=20,
        batch_size=16,
        lr=2 / float(np.square(x.astype(np.float64)).sum(1).mean()),
    )


@cache
def _mnist() -> Dataset:
    return load_mnist()


BUILDERS: dict[str, Callable[[str, int], Built]] = {
    "paper": _bundled,
    "tuning": _drawn,
    "dirichlet": _dirichlet,
    "natural": _bundled,
    "held-out": _foreign,
    "bad-clients": _bad_clients,
    "ablation": _drawn,
}


def unavailable(section: str, environment: str) -> str:
    """Why a federation cannot be made, or nothing: files that data are read from may not be at hand."""
    if section in ("tuning", "ablation"):
        return ""
    if section == "held-out":
        return _unavailable(ORDER[int(environment.rpartition("-")[2]) % len(ORDER)])
    if section == "bad-clients":
        return _unavailable(environment.rsplit("-", 2)[0])
    return _unavailable("mnist" if section == "dirichlet" else environment)


@cache
def _unavailable(data: str) -> str:
    try:
        if data == "mnist":
            _mnist()
        elif data in fu.bundled():
            fu.environment(data).load()
        elif data != "boxes":
            loaded(data)
    except InputError as error:
        return str(error)
    return ""

"""Asynchronous rounds beside synchronous ones over simulated time: when each reaches the synchronous run's accuracy.

All settings are chosen on another trial than those that are shown: the server's step size of each method, and the
exponent of the staleness discount.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import fedunfold as fu
from fedunfold.config import Client, Clock, Environment, ModelSpec
from fedunfold.core.parts import SERVER_OPTIMIZERS
from fedunfold.data.config import MnistSource
from fedunfold.data.partitions import DirichletPartition
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import fedbuff, size
from fedunfold.rules.rule import for_rounds
from fedunfold.runs.system_info import machine
from fedunfold.studies.benchmark.markdown import spread, table
from fedunfold.training.clock import clock_for
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, asynchronous, method

Log = Callable[[str], None]
CHOSEN_ON = 100
"""The trial that settings are chosen on; its speeds, delays and minibatches are in none of those shown."""
SYNCHRONOUS = "synchronous"
NEAR = 0.01
"""The second accuracy is so much less than the synchronous run's last one."""
EXPONENTS = (0.0, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: A name of METHODS.
        setting: Of its grid.
        trial: Its number.
        times: When every step was made, in simulated seconds.
        scores: The test accuracy then.
        staleness: The mean of all updates that entered.
    """

    method: str
    setting: str
    trial: int
    times: tuple[float, ...]
    scores: tuple[float, ...]
    staleness: float

    def time_to(self, score: float) -> float | None:
        """When it first reached an accuracy."""
        return next((time for time, own in zip(self.times, self.scores, strict=True) if own >= score), None)


@dataclass(frozen=True)
class Asynchronous:
    """All runs, those that settings were chosen by among them."""

    machine: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: int
    chosen: Mapping[str, str]
    runs: Sequence[Run]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Asynchronous":
        runs = [Run(**{**run, "times": tuple(run["times"]), "scores": tuple(run["scores"])}) for run in record["runs"]]
        return cls(**{**record, "runs": runs})

    def shown(self, name: str) -> list[Run]:
        """The runs of a method that are shown."""
        chosen = self.chosen[name]
        return [run for run in self.runs if (run.method, run.setting) == (name, chosen) and run.trial != CHOSEN_ON]


def _discounted(a: float, lr: float) -> Method:
    algorithm = method("fedbuff").algorithm
    return Method("fedbuff", replace(algorithm, server=SERVER_OPTIMIZERS.make("sgd", lr=lr)), fedbuff(a))


def _synchronous(lr: float) -> Method:
    algorithm = method("fedavg").algorithm
    return Method("fedavg", replace(algorithm, server=SERVER_OPTIMIZERS.make("sgd", lr=lr)), size())


def _learned(rule: Any) -> Method:
    """A rule learned over other federations, in synchronous rounds; only updates in the buffer enter."""
    return asynchronous(Method(rule.name, replace(rule.algorithm, absent="drop"), rule))


METHODS: Mapping[str, Mapping[str, Callable[[], Method]]] = {
    SYNCHRONOUS: {f"server lr {lr:g}": partial(_synchronous, lr) for lr in (1.0, 2.0)},
    "constant": {f"server lr {lr:g}": partial(_discounted, 0.0, lr) for lr in (1.0, 0.3, 0.1)},
    "1/√(1+s)": {f"server lr {lr:g}": partial(_discounted, 0.5, lr) for lr in (1.0, 0.3)},
    "(1+s)^−a": {f"a = {a:g}": partial(_discounted, a, 1.0) for a in EXPONENTS},
    "pre-trained rule": {"as it comes": lambda: _learned(fu.pretrained("open@1"))},
    "formula": {"as it comes": lambda: _learned(fu.unfolded_formula())},
}


def timed_environment(rounds: int, clients: int = 1000, **changes: Any) -> Environment:
    """Clients of lognormal speeds on MNIST, a hundred of which train at a time."""
    return Environment(
        name="lognormal-speeds",
        rounds=rounds,
        batch_size=10,
        lr=0.05,
        clients_per_round=100,
        clock=Clock(speed_spread=1.0, delay=5.0, buffer=10),
        model=ModelSpec(hidden=(30,)),
        data=MnistSource(),
        partition=DirichletPartition(alpha=0.3),
        clients=tuple(Client(key=f"site-{k}", epochs=2) for k in range(clients)),
    ).replace(**changes)


def measure_asynchronous(
    rounds: int, steps: int, trials: int, log: Log, environment: Environment | None = None
) -> Asynchronous:
    """Choose the settings of every method, and run it with them.

    Args:
        rounds: Of synchronous runs.
        steps: Of asynchronous ones.
        trials: How many are shown.
        log: Says what is being measured.
        environment: In the place of `timed_environment`.
    """
    environment = environment or timed_environment(rounds)
    federation = SimulatedFederation(environment)
    runs: list[Run] = []
    chosen: dict[str, str] = {}
    target = 0.0
    for name, grid in METHODS.items():
        length = rounds if name == SYNCHRONOUS else steps
        if len(grid) > 1:
            tuning = []
            for setting, made in grid.items():
                log(f"{name}, {setting}: choosing")
                tuning.append(_run(federation, name, setting, made(), length, CHOSEN_ON))
            if name == SYNCHRONOUS:
                target = max(run.scores[-1] for run in tuning)
            chosen[name] = min(tuning, key=lambda run: (run.time_to(target) or float("inf"), -run.scores[-1])).setting
            runs += tuning
        else:
            (chosen[name],) = grid
        for trial in range(trials):
            log(f"{name}, {chosen[name]}: trial {trial}")
            runs.append(_run(federation, name, chosen[name], grid[chosen[name]](), length, trial))
    clock = environment.clock or Clock()
    described = {"clients": len(environment.clients), "at_once": environment.clients_per_round, **clock.model_dump()}
    return Asynchronous(machine(), described | {"rounds": rounds}, steps, chosen, runs)


def _run(federation: SimulatedFederation, name: str, setting: str, made: Method, length: int, trial: int) -> Run:
    assert made.rule is not None
    clock = clock_for(federation.environment, federation.data, made.algorithm, length)
    rule = for_rounds(made.rule, length)
    (result,) = run_rounds(federation, rule, length, [f"trial-{trial}"], algorithm=made.algorithm, clock=clock)
    stale = sum(result.staleness) / len(result.staleness) if result.staleness else 0.0
    return Run(name, setting, trial, result.times, tuple(result.scores), stale)


PAGE = """\
# Asynchronous rounds over simulated time

Made by `python -m benchmarks asynchronous`. MNIST divided by Dirichlet(0.3) among {clients} clients, whose speeds are
lognormal with a spread of {speed_spread:g} (a local step of the median client takes {seconds_per_step:g} s), with a
network delay of {delay:g} s on average. {at_once} clients train at a time. Synchronous FedAvg makes {rounds} rounds,
each as long as its slowest client; FedBuff's server makes {steps} steps, each from the {buffer} updates that arrived
first.

How long each method takes to the accuracy that the synchronous run of the same trial ends with, and to a point less:
mean ± standard deviation of those of the {trials} trials that reached it, in simulated seconds.

{table}
Settings are chosen on trial {chosen_on}, whose speeds and minibatches are in none of these: the server's step size, and
the exponent a of the discount (1 + s)^−a among {exponents}, with a server's step of 1. *1/√(1+s)* is FedBuff's
discount and *constant* none. *Pre-trained rule* is `open@1` and *formula* the package's formula. Both were learned in
synchronous rounds over other federations, where they read staleness as the age of remembered updates; here they read it
of those in the buffer. They are used as they come, with the server that they were learned for.

Machine: {device}; simulated time does not depend on it.
"""


def asynchronous_page(found: Asynchronous) -> str:
    """What was measured, in Markdown."""
    waited = {run.trial: run for run in found.shown(SYNCHRONOUS)}

    def times(runs: Sequence[Run], below: float) -> list[float]:
        """When runs reached the synchronous run's accuracy, or so much less."""
        each = (run.time_to(waited[run.trial].scores[-1] - below) for run in runs)
        return [time for time in each if time is not None]

    rows = []
    for name in METHODS:
        runs = found.shown(name)
        cells = []
        for below in (0.0, NEAR):
            reached, own = times(runs, below), times([*waited.values()], below)
            compared = name != SYNCHRONOUS and len(reached) == len(runs)
            sooner = f", {fmean(own) / fmean(reached):.0f} times sooner" if compared else ""
            cells.append(f"{spread(reached, 0)} ({len(reached)} of {len(runs)}{sooner})")
        accuracy, end = spread([100 * run.scores[-1] for run in runs], 1), spread([run.times[-1] for run in runs], 0)
        stale = f"{fmean(run.staleness for run in runs):.1f}"
        rows.append((name, found.chosen[name], *cells, accuracy, end, stale))
    heads = ("rounds and staleness", "chosen", "s to it", "s to a point less", "accuracy at the end (%)", "after s")
    return PAGE.format(
        **found.environment,
        table=table((*heads, "mean staleness"), rows),
        steps=found.steps,
        trials=len(waited),
        chosen_on=CHOSEN_ON,
        exponents=", ".join(f"{a:g}" for a in EXPONENTS),
        device=found.machine["device"],
    )

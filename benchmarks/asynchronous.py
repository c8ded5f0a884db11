"""Asynchronous rounds beside synchronous ones over simulated time: when each reaches the synchronous run's accuracy.

All settings are chosen on another trial than those that are shown: the server's step size of each method, and the
exponent of the staleness discount.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import fedunfold as fu
from fedunfold.config import Client, Clock, Environment, ModelSpec
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundDecision
from fedunfold.data.config import MnistSource
from fedunfold.data.partitions import DirichletPartition
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import fedbuff, size
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import decide, for_rounds
from fedunfold.runs.system_info import machine
from fedunfold.studies.benchmark.markdown import spread, table
from fedunfold.training.clock import clock_for
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, asynchronous, method

Log = Callable[[str], None]
CHOSEN_ON = 100
"""The trial that settings are chosen on; its speeds, delays and minibatches are in none of those shown."""
SYNCHRONOUS = "synchronous"
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

    def order(self, score: float) -> tuple[float, float]:
        """The sooner it reaches an accuracy the better; of those that do not, the one that comes nearer."""
        time = self.time_to(score)
        return (math.inf if time is None else time), -self.scores[-1]


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


@dataclass(frozen=True)
class WeightsAlone:
    """The weights of a learned rule with the step of FedBuff's discount in the place of the rule's own."""

    rule: ParametricRule
    name: str = "weights alone"

    @property
    def required_metrics(self) -> frozenset[Metric]:
        return self.rule.required_metrics

    def with_horizon(self, rounds: int) -> "WeightsAlone":
        return replace(self, rule=self.rule.with_horizon(rounds))

    def __call__(self, report: ClientUpdates, state: Any) -> tuple[RoundDecision, Any]:
        decision, after = self.rule(report, state)
        discounted, _ = decide(fedbuff(), report, None)
        return RoundDecision(decision.weights, discounted.step), after


def _pretrained() -> Method:
    """A rule learned over other federations, in synchronous rounds; only updates in the buffer enter."""
    rule = fu.pretrained("open@1")
    assert rule.algorithm is not None
    return asynchronous(Method(rule.name, replace(rule.algorithm, absent="drop"), rule))


def _weights_alone() -> Method:
    return Method("weights alone", method("fedbuff").algorithm, WeightsAlone(fu.pretrained("open@1")))


METHODS: Mapping[str, Mapping[str, Callable[[], Method]]] = {
    SYNCHRONOUS: {f"server lr {lr:g}": partial(_synchronous, lr) for lr in (1.0, 2.0)},
    "constant": {f"server lr {lr:g}": partial(_discounted, 0.0, lr) for lr in (1.0, 0.3, 0.1)},
    "1/√(1+s)": {f"server lr {lr:g}": partial(_discounted, 0.5, lr) for lr in (1.0, 0.3)},
    "(1+s)^−a": {f"a = {a:g}": partial(_discounted, a, 1.0) for a in EXPONENTS},
    "pre-trained rule": {"as it comes": _pretrained},
    "its weights alone": {"as they come": _weights_alone},
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
    targets: dict[int, float] = {}
    for name, grid in METHODS.items():
        waits = name == SYNCHRONOUS

        def run(setting: str, trial: int, name: str = name, waits: bool = waits) -> Run:
            log(f"{name}, {setting}, trial {trial}")
            target = targets.get(trial)
            return _run(federation, name, setting, METHODS[name][setting](), rounds if waits else steps, trial, target)

        tuning = [run(setting, CHOSEN_ON) for setting in grid] if len(grid) > 1 else []
        if waits:
            best = max(tuning, key=lambda found: found.scores[-1])
        else:
            best = min(tuning, key=lambda found: found.order(targets[CHOSEN_ON]), default=None)
        chosen[name] = next(iter(grid)) if best is None else best.setting
        shown = [run(chosen[name], trial) for trial in range(trials)]
        runs += [*tuning, *shown]
        if waits:
            targets.update({found.trial: found.scores[-1] for found in runs if found.setting == chosen[name]})
    clock = environment.clock or Clock()
    described = {"clients": len(environment.clients), "at_once": environment.clients_per_round, **clock.model_dump()}
    return Asynchronous(machine(), described | {"rounds": rounds}, steps, chosen, runs)


def _run(
    federation: SimulatedFederation,
    name: str,
    setting: str,
    made: Method,
    length: int,
    trial: int,
    target: float | None,
) -> Run:
    """A run, which ends where it reaches its target."""
    assert made.rule is not None
    (result,) = run_rounds(
        federation,
        for_rounds(made.rule, length),
        length,
        [f"trial-{trial}"],
        algorithm=made.algorithm,
        clock=clock_for(federation.environment, federation.data, made.algorithm, length),
        on_round=lambda t, tests: target is not None and tests[0].score >= target,
    )
    stale = sum(result.staleness) / len(result.staleness) if result.staleness else 0.0
    return Run(name, setting, trial, result.times, tuple(result.scores), stale)


PAGE = """\
# Asynchronous rounds over simulated time

Made by `python -m benchmarks asynchronous`. MNIST divided by Dirichlet(0.3) among {clients} clients, whose speeds are
lognormal with a spread of {speed_spread:g} (a local step of the median client takes {seconds_per_step:g} s), with a
network delay of {delay:g} s on average. {at_once} clients train at a time. Synchronous FedAvg makes {rounds} rounds,
each as long as its slowest client; FedBuff's server makes {steps} steps, each from the {buffer} updates that arrived
first.

How long each method takes to the accuracy that the synchronous run of the same trial ends with, mean ± standard
deviation of those of the {trials} trials that reached it. Asynchronous runs end there.

{table}
Settings are chosen on trial {chosen_on}, whose speeds and minibatches are in none of these: the server's step size, and
the exponent a of the discount (1 + s)^−a among {exponents}, with a server's step of 1. *1/√(1+s)* is FedBuff's
discount and *constant* none. *Pre-trained rule* is `open@1` as it comes, with the server that it was learned for. It
was learned in synchronous rounds over other federations, where it read staleness as the age of remembered updates; here
it reads it of those in the buffer. *Its weights alone* are under FedBuff's step, the mean of 1/√(1+s), in the place of
its own.

Machine: {device}; simulated time does not depend on it.
"""


def asynchronous_page(found: Asynchronous) -> str:
    """What was measured, in Markdown."""
    waited = {run.trial: run for run in found.shown(SYNCHRONOUS)}
    targets = {trial: run.scores[-1] for trial, run in waited.items()}
    own = [waited[trial].time_to(target) or 0.0 for trial, target in targets.items()]
    rows = []
    for name in METHODS:
        runs = found.shown(name)
        reached = [time for run in runs if (time := run.time_to(targets[run.trial])) is not None]
        sooner = f"{sum(own) / len(own) / (sum(reached) / len(reached)):.1f}" if len(reached) == len(runs) else "–"
        rows.append(
            (
                name,
                found.chosen[name],
                f"{len(reached)} of {len(runs)}",
                spread(reached, 0),
                sooner,
                spread([100 * run.scores[-1] for run in runs], 1),
                spread([run.times[-1] for run in runs], 0),
                f"{sum(run.staleness for run in runs) / len(runs):.1f}",
            )
        )
    heads = (
        "staleness",
        "chosen",
        "reached",
        "s to it",
        "times sooner",
        "last accuracy (%)",
        "after s",
        "mean staleness",
    )
    return PAGE.format(
        **found.environment,
        table=table(heads, rows),
        steps=found.steps,
        trials=len(targets),
        chosen_on=CHOSEN_ON,
        exponents=", ".join(f"{a:g}" for a in EXPONENTS),
        device=found.machine["device"],
    )

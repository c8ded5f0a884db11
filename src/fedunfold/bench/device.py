"""What a device takes: a local step of all clients, averaged over a whole learning, trials one by one and together, and
a step of the learning by the exact gradient.

Everything counts that a user waits for: drawing minibatches, aggregation, absent clients, the way back, the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedunfold.bench.measuring import Timed, side_by_side
from fedunfold.bench.work import outer_step, size_theta
from fedunfold.environments import Environment, environment
from fedunfold.experiments.learning import device_of
from fedunfold.machine import machine
from fedunfold.rounds import run_together
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding import Learning, learn
from fedunfold.weighting.size import size

TRIALS = 10


@dataclass(frozen=True)
class OnDevice:
    """An environment: the local steps of a run, and seconds of a learning by the fast schedule, of one run, of ten
    together, and of one exact step of the learning. `busy` are those of a learning in which a GPU computes; in the
    others it waits for the processor."""

    parameters: int
    steps: int
    iterations: int
    learning: Timed
    one: Timed
    together: Timed
    exact: Timed
    busy: float | None = None

    @property
    def microseconds(self) -> Timed:
        """Of a local step, all clients together."""
        each = 1e6 / (self.iterations * self.steps)
        return Timed(self.learning.median * each, self.learning.least * each, self.learning.most * each)


@dataclass(frozen=True)
class DeviceBench:
    """By environment."""

    machine: Mapping[str, Any]
    environments: Mapping[str, OnDevice]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_device(
    names: Sequence[str], device: str, repeats: int, say: Callable[[str], None] = lambda what: None
) -> DeviceBench:
    """Every environment on that device, several times."""
    found = {}
    for name in names:
        say(name)
        found[name] = _measured(environment(name), device_of(device), repeats)
    return DeviceBench(machine(device), found)


def steps_of_a_run(env: Environment) -> int:
    """Σ_t max_k τ_k: clients train side by side, and a round lasts as long as its longest walk."""
    minibatches = [-(-size // env.batch_size) for size in env.load().sizes]
    return sum(max(env.epochs(k, t) * count for k, count in enumerate(minibatches)) for t in range(env.rounds))


def _measured(env: Environment, device: torch.device, repeats: int) -> OnDevice:
    federation, learning = SimulatedFederation(env, device=device), Learning()
    runs = [f"trial-{trial}" for trial in range(TRIALS)]

    def finished(work: Callable[[], object]) -> Callable[[], None]:
        """A GPU may still be at it when a call returns."""

        def waited() -> None:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return waited

    learned = finished(lambda: learn(federation, env.rounds, learning=learning))
    seconds = side_by_side(
        {
            "learning": learned,
            "one": finished(lambda: run_together(federation, size(), env.rounds, runs[:1])),
            "together": finished(lambda: run_together(federation, size(), env.rounds, runs)),
            "exact": finished(lambda: outer_step(federation, size_theta(env), "exact")),
        },
        repeats,
    )
    timed = {name: Timed.of(measured) for name, measured in seconds.items()}
    busy = _busy(learned) if device.type == "cuda" else None
    parameters = len(federation.initial_model("trial-0"))
    return OnDevice(parameters, steps_of_a_run(env), learning.iterations, **timed, busy=busy)


def _busy(work: Callable[[], None]) -> float:
    """Seconds of a GPU's kernels and copies, which come one after the other."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
    microseconds: float = sum(event.self_device_time_total for event in seen.key_averages())
    return microseconds / 1e6


def device_page(found: DeviceBench) -> str:
    """Markdown."""
    made = found.machine
    lines = [
        "# Times on a device\n",
        "Made by `fedunfold bench device`. A local step is one minibatch of every client; its time is that of a whole "
        "learning by the fast schedule, divided by its steps, with all that comes between them. Of a learning, a GPU "
        "is at work for the part that is given; for the rest it waits for the processor. An exact step is one of the "
        "learning, forwards and all the way back. Machine: "
        f"{made['device']}, {made['cores']} cores, torch {made['torch']}.\n",
        "| environment | parameters | local steps a run | µs a step (least to most) | a learning (s) | at work (%) | "
        f"a run (s) | {TRIALS} runs together (s) | times one | an exact step (s) | times a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, on in found.environments.items():
        step, one, together, exact = on.microseconds, on.one.median, on.together.median, on.exact.median
        busy = "" if on.busy is None else f"{100 * on.busy / on.learning.median:.0f}"
        lines.append(
            f"| {name} | {on.parameters} | {on.steps} | {step.median:.1f} ({step.least:.1f} to {step.most:.1f}) | "
            f"{on.learning.median:.2f} | {busy} | {one:.3f} | {together:.3f} | {together / one:.1f} | {exact:.3f} | "
            f"{exact / one:.1f} |"
        )
    return "\n".join(lines) + "\n"

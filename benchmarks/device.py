"""What a device takes: a local step of all clients, averaged over a whole learning; runs, and draws of a step of the
learning, one and ten at once; and a step by the exact gradient.

Everything counts that a user waits for: drawing minibatches, aggregation, absent clients, the way back, the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Timed, side_by_side
from benchmarks.workload import size_theta
from fedunfold.config import Environment, environment
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.size import size
from fedunfold.runs.system_info import machine
from fedunfold.training.learn import device_of
from fedunfold.training.loop import Algorithm, run_together
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad

AT_ONCE = 10


@dataclass(frozen=True)
class OnDevice:
    """An environment: the local steps of a run, and seconds of a learning by the fast schedule, of one run and ten
    together, of a step of the learning with one draw and with ten, and of an exact one. `busy` are those of a learning
    in which a GPU computes; in the others it waits for the processor."""

    parameters: int
    steps: int
    iterations: int
    learning: Timed
    run: Timed
    runs: Timed
    draw: Timed
    draws: Timed
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
    federation, learning, theta = SimulatedFederation(env, device=device), Learning(), size_theta(env)
    start = federation.initial_model("learn-0")

    def finished(work: Callable[[], object]) -> Callable[[], None]:
        """A GPU may still be at it when a call returns."""

        def waited() -> None:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return waited

    def runs(count: int) -> Callable[[], None]:
        names = [f"trial-{trial}" for trial in range(count)]
        return finished(lambda: run_together(federation, size(), env.rounds, names))

    def draws(count: int, adjoint: AdjointKind = "first_order") -> Callable[[], None]:
        how = (federation, theta, Algorithm(), OuterLoss(), adjoint)
        names = [f"learn-{draw}" for draw in range(count)]
        return finished(lambda: unroll_and_grad(*how, runs=names, models=[start] * count))

    learned = finished(lambda: learn(federation, env.rounds, learning=learning))
    seconds = side_by_side(
        {
            "learning": learned,
            "run": runs(1),
            "runs": runs(AT_ONCE),
            "draw": draws(1),
            "draws": draws(AT_ONCE),
            "exact": draws(1, "exact"),
        },
        repeats,
    )
    timed = {name: Timed.of(measured) for name, measured in seconds.items()}
    busy = _busy(learned) if device.type == "cuda" else None
    return OnDevice(len(start), steps_of_a_run(env), learning.iterations, **timed, busy=busy)


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
        f"is at work for the part that is given; for the rest it waits for the processor. Machine: {made['device']}, "
        f"{made['cores']} cores, torch {made['torch']}.\n",
        "| environment | parameters | local steps a run | µs a step (least to most) | a learning (s) | at work (%) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, on in found.environments.items():
        step = on.microseconds
        busy = "" if on.busy is None else f"{100 * on.busy / on.learning.median:.0f}"
        lines.append(
            f"| {name} | {on.parameters} | {on.steps} | {step.median:.1f} ({step.least:.1f} to {step.most:.1f}) | "
            f"{on.learning.median:.2f} | {busy} |"
        )
    lines += [
        "\nSeconds of a run with its tests, and of an outer step, which is one of the learning: by the first-order "
        "gradient and, forwards and all the way back, by the exact one. Runs, and the draws that an outer step "
        f"averages, also {AT_ONCE} in step, as `compare` and `--draws` do it on a GPU.\n",
        f"| environment | a run | {AT_ONCE} runs | times one run | an outer step | with {AT_ONCE} draws | "
        "times one draw | an exact outer step | times one run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, on in found.environments.items():
        run, runs, draw, draws, exact = (t.median for t in (on.run, on.runs, on.draw, on.draws, on.exact))
        lines.append(
            f"| {name} | {run:.3f} | {runs:.3f} | {runs / run:.1f} | {draw:.3f} | {draws:.3f} | {draws / draw:.1f} | "
            f"{exact:.3f} | {exact / run:.1f} |"
        )
    return "\n".join(lines) + "\n"

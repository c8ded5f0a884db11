"""What a device takes: a local step of all clients, averaged over a whole weight-learning run; runs, and samples of an
outer step, one and ten together; and an outer step by the exact gradient.

Everything counts that a user waits for: drawing minibatches, aggregation, absent clients, the backward pass, the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Timed, time_in_turn
from benchmarks.workload import size_theta
from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.params import device_of
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.size import size
from fedunfold.runs.system_info import machine
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.outer_loss import Path

AT_ONCE = 10


@dataclass(frozen=True)
class OnDevice:
    """What an environment takes; times are seconds.

    Attributes:
        parameters: Of the model.
        steps: Local steps of a run.
        iterations: Of a weight-learning run by the fast schedule.
        learning: That weight-learning run.
        run: One run.
        runs: Ten runs together.
        sample: An outer step with one sample.
        samples: An outer step with ten.
        exact: An exact outer step.
        busy: How long a GPU computes in a weight-learning run; for the rest of it, it waits for the processor.
    """

    parameters: int
    steps: int
    iterations: int
    learning: Timed
    run: Timed
    runs: Timed
    sample: Timed
    samples: Timed
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
    names: Sequence[str], device: str, repeats: int, log: Callable[[str], None] = lambda what: None
) -> DeviceBench:
    """Every environment on that device, several times."""
    found = {}
    for name in names:
        log(name)
        found[name] = _measured(environment(name), device_of(device), repeats)
    return DeviceBench(machine(device), found)


def steps_of_a_run(env: Environment) -> int:
    """Σ_t max_k τ_k: clients train in parallel, and a round lasts as long as its longest local training."""
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
        return finished(lambda: run_rounds(federation, size(), env.rounds, names))

    def samples(count: int, adjoint: AdjointKind = "first_order") -> Callable[[], None]:
        how = (federation, theta, Algorithm(), Path(), adjoint)
        names = [f"learn-{sample}" for sample in range(count)]
        return finished(lambda: unroll_and_grad(*how, runs=names, models=[start] * count))

    learned = finished(lambda: learn(federation, env.rounds, learning=learning))
    seconds = time_in_turn(
        {
            "learning": learned,
            "run": runs(1),
            "runs": runs(AT_ONCE),
            "sample": samples(1),
            "samples": samples(AT_ONCE),
            "exact": samples(1, "exact"),
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
        "Made by `python -m benchmarks device`. A local step is one minibatch of every client; its time is that of a "
        "whole weight-learning run by the fast schedule, divided by its steps, with all that comes between them. In "
        "such a run, a GPU is at work for the part that is given; for the rest it waits for the processor. "
        f"Machine: {made['device']}, {made['cores']} cores, torch {made['torch']}.\n",
        "| environment | parameters | local steps a run | µs a step (least to most) | learning (s) | at work (%) |",
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
        "\nSeconds of a run with its tests, and of an outer step: by the first-order gradient and, forward and "
        "backward through all rounds, by the exact one. Runs, and the samples that an outer step averages, also "
        f"{AT_ONCE} together, as `compare` and `--num-samples` do it on a GPU.\n",
        f"| environment | a run | {AT_ONCE} runs | times one run | an outer step | with {AT_ONCE} samples | "
        "times one sample | an exact outer step | times one run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, on in found.environments.items():
        run, runs, one, ten, exact = (t.median for t in (on.run, on.runs, on.sample, on.samples, on.exact))
        lines.append(
            f"| {name} | {run:.3f} | {runs:.3f} | {runs / run:.1f} | {one:.3f} | {ten:.3f} | {ten / one:.1f} | "
            f"{exact:.3f} | {exact / run:.1f} |"
        )
    return "\n".join(lines) + "\n"

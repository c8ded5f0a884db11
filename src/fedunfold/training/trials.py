"""The trials of a method: runs that differ in their randomness alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.rule import for_rounds
from fedunfold.tracking import CallbackList
from fedunfold.training.clock import clock_for
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method


def run_trials(
    federation: SimulatedFederation,
    chosen: Method,
    trials: range,
    digest: str,
    callbacks: CallbackList,
    checkpoint: Callable[[str], Path | None],
    tested: Callable[[RunResult, str, Algorithm], RunResult],
) -> tuple[RunResult, ...]:
    """Trials of a method, as many together as the federation says is worth it.

    Args:
        federation: Who trains.
        chosen: The method.
        trials: Their numbers.
        digest: Stands for the data and how clients train.
        callbacks: What is called on the way.
        checkpoint: Where trials are saved, by the name of the first of those that run together.
        tested: Adds to a result what clients held out, from it, the run's name and the algorithm.
    """
    assert chosen.rule is not None
    rounds = federation.environment.rounds
    rule = for_rounds(chosen.rule, rounds)
    clock = clock_for(federation.environment, federation.data, chosen.algorithm, rounds)
    runs: list[RunResult] = []
    for first in trials[:: federation.max_parallel_runs]:

        def report(t: int, tests: Sequence[Evaluation], first: int = first) -> bool:
            """Whether every one of the trials is to stop."""
            stops = [callbacks.on_round_end(chosen.name, trial, t, test) for trial, test in enumerate(tests, first)]
            return all(stops)

        together = range(first, min(first + federation.max_parallel_runs, trials.stop))
        outcomes = run_rounds(
            federation,
            rule,
            rounds,
            [f"trial-{trial}" for trial in together],
            algorithm=chosen.algorithm,
            digest=digest,
            checkpoint=checkpoint(f"trial-{first}"),
            checkpoint_seconds=None,
            clock=clock,
            on_round=report,
        )
        for trial, found in zip(together, outcomes, strict=True):
            outcome = tested(found, f"trial-{trial}", chosen.algorithm)
            callbacks.on_trial_end(chosen.name, trial, len(trials), outcome)
            runs.append(outcome)
    return tuple(runs)


def checkpoint_file(folder: Path | None, position: int, name: str) -> Path | None:
    """Where what is done of a part of the work is saved, if anywhere.

    Args:
        folder: Of the whole work's checkpoints.
        position: Which method of several it is.
        name: Of the part.
    """
    return folder and folder / f"{position}-{name}.safetensors"

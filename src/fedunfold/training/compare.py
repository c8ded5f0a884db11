"""Run methods on an environment, and compare them over several trials."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import Evaluation
from fedunfold.core.params import ModelFactory
from fedunfold.core.run_result import RunResult
from fedunfold.core.settings import is_count
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import Weigh, WeightingRule, as_rule
from fedunfold.tracking import Callback, CallbackList, callback_scope
from fedunfold.tracking.callback import OuterStepRelay
from fedunfold.training.comparison import Comparison, MethodResult
from fedunfold.training.learn import described, device_of, digest_of, learn_weights
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, learned_method, method
from fedunfold.unfolding import Learning, check_learnable


def run(
    env: Environment | str | Path,
    method: Method | WeightingRule | Weigh | str = "fedavg",
    *,
    trial: int = 0,
    model: ModelFactory | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> RunResult:
    """Train an environment's federation once.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        method: A method or its name, or a weighting rule, which is used with plain FedAvg; learned weights are used
            with what they were learned for. A method that learns its weights has to come with them.
        trial: Which trial's randomness to draw.
        model: A function that builds a classifier in place of the environment's own.
        device: ``cpu`` or ``cuda``.
        dtype: The precision of the models.
        checkpoint: A file from which an interrupted run is resumed.
        callback: Called after every round; it may stop the run there.

    Returns:
        The run.

    Raises:
        InputError: The method has no weights yet, or something does not fit the environment.
        DivergenceError: Training left the finite numbers.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew", "fedavg")
    >>> len(result.accuracies)
    10
    """
    env = environment(env)
    chosen = _as_method(method)
    if chosen.rule is None:
        raise InputError(f"method '{chosen.name}' needs learned weights; learn them first, or use compare.")
    federation = SimulatedFederation(env, model=model, device=device_of(device), dtype=dtype)
    rule = _fitting(chosen.rule, federation, model)
    settings = {"method": chosen.name, "rule": rule.name, "algorithm": chosen.algorithm.describe(), "trial": trial}
    with callback_scope(callback, {**described("run", env, env.load(), device, dtype), **settings}) as callbacks:
        (result,) = run_rounds(
            federation,
            rule,
            env.rounds,
            [f"trial-{trial}"],
            algorithm=chosen.algorithm,
            digest=digest_of(federation, model),
            checkpoint=checkpoint,
            checkpoint_seconds=None,
            on_round=lambda t, seen: callbacks.on_round_end(chosen.name, trial, t, seen[0]),
        )
        callbacks.on_trial_end(chosen.name, trial, 1, result)
        last = result.evaluations[-1]
        callbacks.on_results([{"method": chosen.name, "accuracy": 100 * last.accuracy, "loss": last.loss}])
    return result


def trained_module(
    env: Environment | str | Path, result: RunResult, *, model: ModelFactory | None = None
) -> torch.nn.Module:
    """The classifier that a run trained, ready to predict or to save its `state_dict()`.

    Args:
        env: The environment of the run.
        result: The run.
        model: The function that built its classifier, where it was not the environment's own.

    Returns:
        The module, on the CPU.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew")
    >>> fu.trained_module("digits-label-skew", result)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    return SimulatedFederation(environment(env), model=model).module(result.model)


def client_accuracies(
    env: Environment | str | Path, results: Sequence[RunResult], *, model: ModelFactory | None = None
) -> list[list[float]]:
    """Accuracy of every run's final model on each client's own training data.

    Args:
        env: The environment of the runs.
        results: The runs.
        model: The function that built their classifier, where it was not the environment's own.

    Returns:
        Of every run a fraction for each client.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew")
    >>> len(client_accuracies("digits-label-skew", [result])[0])
    5
    """
    if not results:
        return []
    federation = SimulatedFederation(environment(env), model=model, dtype=results[0].model.dtype)
    return [federation.client_accuracies(result.model).tolist() for result in results]


def compare(
    env: Environment | str | Path,
    methods: Sequence[Method | WeightingRule | Weigh | str],
    *,
    trials: int = 5,
    learning: Learning | None = None,
    model: ModelFactory | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoints: Path | None = None,
    callback: Callback | None = None,
) -> Comparison:
    """Run every method several times, each trial with its own initial model, minibatches and absences.

    Trial i draws the same for every method. Methods with learned weights learn them once, before their trials.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        methods: Names (`fedavg`, `duw-fednova`, …), weighting rules (used with plain FedAvg), learned weights (used
            with what they were learned for), or `Method`s.
        trials: Runs of each method.
        learning: How weights are learned; by default as each method has it.
        model: A function that builds a classifier in place of the environment's own.
        device: ``cpu`` or ``cuda``.
        dtype: The precision of the models.
        checkpoints: A folder from which an interrupted comparison is resumed.
        callback: Called after every outer iteration, round and trial; it may stop what is being computed.

    Returns:
        The comparison.

    Raises:
        InputError: A method is unknown, named twice or does not fit the environment; all are checked before the first.
        DivergenceError: Training left the finite numbers.

    >>> import fedunfold as fu
    >>> fu.compare("digits-label-skew", [fu.size(), "fedprox"], trials=1).trials
    1
    """
    env = environment(env)
    if not is_count(trials):
        raise InputError(f"a comparison needs at least 1 trial, not {trials!r}.")
    given = methods if isinstance(methods, Sequence) and not isinstance(methods, str) else [methods]
    chosen = [_as_method(entry) for entry in given]
    if not chosen:
        raise InputError("a comparison needs at least one method, such as fedavg.")
    names = [entry.name for entry in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"method '{twice}' is named twice; name each once.")
    federation = SimulatedFederation(env, model=model, device=device_of(device), dtype=dtype)
    # Everything that can be refused is refused now, and not after hours of the methods before it.
    for entry in chosen:
        entry.algorithm.aggregator.check_enough(len(env.clients))
        if entry.rule is None:
            check_learnable(entry.algorithm)
        else:
            _fitting(entry.rule, federation, model)
    settings = {
        "methods": names,
        "trials": trials,
        "algorithms": {entry.name: entry.algorithm.describe() for entry in chosen},
        "learning": {entry.name: asdict(learning or entry.learning) for entry in chosen if entry.rule is None},
    }
    digest = digest_of(federation, model)
    results = []
    settings = {**described("compare", env, federation.data, device, dtype), **settings}
    with callback_scope(callback, settings) as callbacks:
        for position, entry in enumerate(chosen):
            rule, algorithm = entry.rule, entry.algorithm
            if rule is None:
                rule = learn_weights(
                    env,
                    algorithm=entry.algorithm,
                    learning=learning or entry.learning,
                    model=model,
                    device=device,
                    dtype=dtype,
                    checkpoint=checkpoints and checkpoints / f"{position}-learning.safetensors",
                    callback=OuterStepRelay(callbacks, entry.name),
                )
                algorithm = rule.algorithm  # with the step sizes learned beside the weights
            rule = _fitting(rule, federation, model)
            saved = checkpoints and checkpoints / str(position)
            runs = _trials(entry.name, federation, rule, algorithm, trials, callbacks, digest, saved)
            results.append(MethodResult(entry.name, runs, rule if isinstance(rule, LearnedWeights) else None))
        comparison = Comparison(env.name, trials, tuple(results))
        callbacks.on_results([result.as_row() for result in comparison.methods])
    return comparison


def _trials(
    name: str,
    federation: SimulatedFederation,
    rule: WeightingRule,
    algorithm: Algorithm,
    trials: int,
    callbacks: CallbackList,
    digest: str,
    saved: Path | None,
) -> tuple[RunResult, ...]:
    """All trials of a method, as many together as the federation says is worth it.

    `saved` is how the names of their checkpoints begin.
    """
    rounds = federation.environment.rounds
    runs: list[RunResult] = []
    names = [f"trial-{trial}" for trial in range(trials)]
    for first in range(0, trials, federation.max_parallel_runs):

        def report(t: int, tests: Sequence[Evaluation], first: int = first) -> bool:
            """Whether every one of the trials is to stop."""
            stops = [callbacks.on_round_end(name, trial, t, test) for trial, test in enumerate(tests, first)]
            return all(stops)

        outcomes = run_rounds(
            federation,
            rule,
            rounds,
            names[first : first + federation.max_parallel_runs],
            algorithm=algorithm,
            digest=digest,
            checkpoint=saved and saved.with_name(f"{saved.name}-trial-{first}.safetensors"),
            checkpoint_seconds=None,
            on_round=report,
        )
        for outcome in outcomes:
            callbacks.on_trial_end(name, len(runs), trials, outcome)
            runs.append(outcome)
    return tuple(runs)


def _as_method(given: Method | WeightingRule | Weigh | str) -> Method:
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return method(given)
    if isinstance(given, LearnedWeights):
        return learned_method(given)
    rule = as_rule(given)
    return Method(rule.name, Algorithm(), rule)


def _fitting(rule: WeightingRule, federation: SimulatedFederation, model: ModelFactory | None) -> WeightingRule:
    """Learned weights are refused where they were learned for another federation."""
    if not isinstance(rule, LearnedWeights):
        return rule
    env = federation.environment
    return rule.adapt(env.load().keys, env.rounds, digest_of(federation, model))

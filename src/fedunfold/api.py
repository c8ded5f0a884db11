"""What a user calls: learn weights for an environment, run methods on it, compare them over several trials."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedunfold.client_scores import HeldOut
from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ModelFactory, device_of
from fedunfold.core.run_result import RunResult
from fedunfold.core.settings import is_count
from fedunfold.core.task import PrimaryMetric
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import Weigh, WeightingRule, describe_rule, no_server_data, uses_of
from fedunfold.tracking import Callback, callback_scope
from fedunfold.training.comparison import Comparison, MethodResult
from fedunfold.training.methods import Method, as_compared, as_method, learned_method
from fedunfold.training.personal import Personal
from fedunfold.training.references import References
from fedunfold.training.trials import checkpoint_file, run_trials
from fedunfold.unfolding import Learning, check_learnable, check_learning, learn
from fedunfold.version import VERSION


def learn_weights(
    env: Environment | str | Path,
    *,
    method: Method | str | None = None,
    algorithm: Algorithm | None = None,
    learning: Learning | None = None,
    model: ModelFactory | None = None,
    fraction: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> LearnedWeights:
    """Learn how much each client should count in each round of an environment.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        method: One that learns weights, such as ``fedunfold-table`` or ``duw-fednova``: algorithm and learning in one.
        algorithm: What the weights will be used with: local and server optimiser, treatment of absent clients; by
            default the method's.
        learning: How they are learned; by default as the method has it.
        model: A function that builds a classifier in place of the environment's own.
        fraction: The part of its data that every client learns weights with.
        device: ``cpu`` or ``cuda``.
        dtype: The precision of the models.
        checkpoint: A file from which an interrupted run is resumed.
        callback: Called after every outer iteration; it may stop learning there.

    Returns:
        The learned weights Θ[t, k], with their history.

    Raises:
        InputError: Weights cannot be learned through the algorithm, or something does not fit the environment.
        DivergenceError: Training left the finite numbers.

    >>> import fedunfold as fu
    >>> learned = fu.learn_weights("digits-label-skew", learning=fu.Learning(iterations=2))
    >>> learned.weights.shape
    torch.Size([10, 5])
    """
    env, chosen = (
        environment(env),
        Method(LearnedWeights.name, Algorithm(), None) if method is None else as_method(method),
    )
    if chosen.rule is not None:
        raise InputError(f"method '{chosen.name}' learns no weights; choose one that does, such as fedunfold-table.")
    algorithm, learning = algorithm or chosen.algorithm, learning or chosen.learning
    data = env.load().restricted(fraction, env.seed)
    federation = SimulatedFederation(env, data, model=model, device=device_of(device), dtype=dtype)
    check_learnable(algorithm)
    check_learning(learning)
    chosen = Method(chosen.name, algorithm, None, learning)
    settings = {"algorithm": algorithm.describe(), "learning": asdict(learning), "fraction": fraction}
    with callback_scope(callback, described("learn", federation, dtype) | settings) as callbacks:
        learned = _learn(federation, chosen, federation_digest(federation, model), callbacks, checkpoint)
        last = {"iteration": len(learned.losses) - 1, "outer_loss": float(learned.losses[-1])}
        callbacks.on_results([{"method": chosen.name, **last}])
    return learned


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
        method: A method or its name, or a weighting rule, which is used with plain FedAvg; learned weights and
            pre-trained rules are used with what they were learned for. A method that learns its weights has to come
            with them.
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
    >>> len(result.scores)
    10
    """
    chosen = as_method(method)
    if chosen.reference is not None:
        raise InputError(f"'{chosen.reference}' is a reference and no run of its own; name it in a comparison.")
    if chosen.rule is None:
        raise InputError(
            f"method '{chosen.name}' needs learned weights; learn_weights learns them, and compare does so itself."
        )
    federation = SimulatedFederation(environment(env), model=model, device=device_of(device), dtype=dtype)
    held = HeldOut.of(federation)
    digest = federation_digest(federation, model)
    _check_fit(chosen.rule, federation, digest)
    parts = {"method": chosen.name, **describe_rule(chosen.rule), "trial": trial}
    parts |= {"algorithm": chosen.algorithm.describe()}
    with callback_scope(callback, described("run", federation, dtype) | parts) as callbacks:
        only = range(trial, trial + 1)
        (result,) = run_trials(federation, chosen, only, digest, callbacks, lambda _: checkpoint, held.tested)
        last = result.evaluations[-1]
        shown = last.primary.shown(last.score, last.metrics)
        score = {last.primary.name: shown[last.primary.name], "loss": last.loss}
        callbacks.on_results([{"method": chosen.name, **score, "metrics": shown}])
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


def compare(
    env: Environment | str | Path,
    methods: Sequence[Method | WeightingRule | Weigh | str],
    *,
    trials: int = 5,
    personal: Personal | None = None,
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
        methods: Names (`fedavg`, `duw-fednova`, …), weighting rules (used with plain FedAvg), learned weights or
            pre-trained rules (used with what they were learned for), or `Method`s. The references `local`, `pooled` and
            `majority` are each client alone, all rows in one place, and no training.
        trials: Runs of each method.
        personal: Epochs for which every client trains each final model further, to be tested on what it holds out;
            "own": as many as it makes in a round.
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
    chosen = [replace(method, learning=learning or method.learning) for method in map(as_compared, given)]
    if not chosen:
        raise InputError("a comparison needs at least one method, such as fedavg.")
    names = [entry.name for entry in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"method '{twice}' is named twice; name each once.")
    federation = SimulatedFederation(env, model=model, device=device_of(device), dtype=dtype)
    held = HeldOut.of(federation, personal)
    references = References(federation, held.federation)
    digest = federation_digest(federation, model)
    # Everything that can be refused is refused now, and not after hours of the methods before it.
    for entry in chosen:
        entry.algorithm.aggregator.check_enough(len(env.clients))
        entry.algorithm.check_layers(federation.layout)
        if entry.reference is not None:
            references.check(entry.reference)
        elif entry.rule is None:
            check_learnable(entry.algorithm)
        else:
            _check_fit(entry.rule, federation, digest)
    settings = {
        "methods": names,
        "trials": trials,
        "algorithms": {entry.name: entry.algorithm.describe() for entry in chosen},
        "learning": {entry.name: asdict(entry.learning) for entry in chosen if entry.learns},
        "rules": {entry.name: describe_rule(entry.rule) for entry in chosen if entry.rule is not None},
    }
    results = []
    with callback_scope(callback, described("compare", federation, dtype) | settings) as callbacks:
        for position, entry in enumerate(chosen):
            saved = partial(checkpoint_file, checkpoints, position)
            ready, learned = entry, entry.rule if isinstance(entry.rule, LearnedWeights) else None
            if entry.learns:
                learned = _learn(federation, entry, digest, callbacks, saved("learning"))
                ready = learned_method(learned, entry.name)  # with the step sizes learned beside the weights
            if entry.reference is not None:
                runs = references.trials(entry, range(trials), callbacks, saved)
            else:
                runs = run_trials(federation, ready, range(trials), digest, callbacks, saved, held.tested)
            results.append(MethodResult(entry.name, runs, learned))
        comparison = Comparison(env.name, trials, tuple(results))
        callbacks.on_results([result.as_row() for result in comparison.methods])
    return comparison


def _learn(
    federation: SimulatedFederation, method: Method, digest: str, callbacks: Callback, checkpoint: Path | None
) -> LearnedWeights:
    """Weights for a method, learned in its way."""
    return learn(
        federation,
        federation.environment.rounds,
        algorithm=method.algorithm,
        learning=method.learning,
        digest=digest,
        checkpoint=checkpoint,
        on_iteration=lambda so_far: callbacks.on_outer_step(method.name, so_far, method.learning.iterations),
    )


def _check_fit(rule: WeightingRule, federation: SimulatedFederation, digest: str) -> None:
    """Refuse learned weights that were learned for another federation, and a rule that needs data the server lacks."""
    if "server data" in uses_of(rule) and federation.data.server is None:
        raise no_server_data(rule.name)
    if isinstance(rule, LearnedWeights):
        rule.adapt(federation.data.keys, federation.environment.rounds, digest)


def federation_digest(federation: SimulatedFederation, model: ModelFactory | None) -> str:
    """What learned weights record of their federation; a custom model counts by its shapes and what is frozen in it."""
    digest = federation.environment.digest(federation.environment.load())
    if model is None:
        return digest
    shapes = [list(shape) for shape in federation.layout.shapes]
    return hashlib.sha256(f"{digest} {shapes} {federation.frozen_digest}".rstrip().encode()).hexdigest()


def described(command: str, federation: SimulatedFederation, dtype: torch.dtype) -> dict[str, Any]:
    """What a callback is given about every run: the federation and what it is computed on."""
    env = federation.environment
    return {
        "command": command,
        "environment": env.name,
        "clients": list(federation.data.keys),
        "metric": PrimaryMetric.of(federation.data.task).describe(),
        **env.model_dump(include={"rounds", "batch_size", "lr", "seed"}),
        "device": str(federation.device),
        "dtype": str(dtype).removeprefix("torch."),
        "version": VERSION,
    }

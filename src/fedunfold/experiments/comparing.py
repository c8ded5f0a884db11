"""Run methods on an environment, and compare them over several trials."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedunfold.environments import Environment, environment
from fedunfold.errors import InputError
from fedunfold.experiments.learning import device_of, digest_of, learn_weights
from fedunfold.experiments.methods import Method, learned_method, method
from fedunfold.models import ModelFactory
from fedunfold.rounds import Algorithm, RunResult, run_rounds, run_together
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding import Learning, check_learnable
from fedunfold.weighting.learned import LearnedWeights
from fedunfold.weighting.rule import Weigh, WeightingRule, as_rule


@dataclass(frozen=True)
class MethodResult:
    """A method's test accuracies over its trials (fractions, [trials][rounds]), and weights it learned."""

    name: str
    trials: tuple[RunResult, ...]
    learned: LearnedWeights | None = None

    @property
    def finals(self) -> list[float]:
        """Accuracy after the last round, in percent, of every trial."""
        return [100 * trial.accuracies[-1] for trial in self.trials]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.finals)

    @property
    def sd(self) -> float:
        """Standard deviation over the trials (n − 1); 0 for a single one."""
        return statistics.stdev(self.finals) if len(self.trials) > 1 else 0.0

    @property
    def rounds(self) -> list[float]:
        """Mean accuracy after every round, in percent."""
        per_round = zip(*(trial.accuracies for trial in self.trials), strict=True)
        return [100 * statistics.fmean(values) for values in per_round]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    environment: str
    trials: int
    methods: tuple[MethodResult, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Plain values; accuracies in percent."""
        return {
            "environment": self.environment,
            "trials": self.trials,
            "methods": [
                {
                    "method": result.name,
                    "accuracy_mean": result.mean,
                    "accuracy_sd": result.sd,
                    "rounds": result.rounds,
                }
                for result in self.methods
            ],
        }


class Watcher:
    """Told about progress; does nothing by itself. Override what is of interest."""

    def learning(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        """An outer iteration ended."""

    def trial(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        """A trial ended."""


def run(
    env: Environment | str | Path,
    method: Method | WeightingRule | Weigh | str = "fedavg",
    *,
    trial: int = 0,
    model: ModelFactory | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    on_round: Callable[[int, Any], None] | None = None,
) -> RunResult:
    """Train an environment's federation once. A method that learns its weights has to come with them.

    A `checkpoint` file lets an interrupted run go on.

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
    return run_rounds(
        federation,
        _fitting(chosen.rule, env, model),
        env.rounds,
        algorithm=chosen.algorithm,
        run=f"trial-{trial}",
        digest=digest_of(env, model),
        checkpoint=checkpoint,
        checkpoint_seconds=None,
        on_round=on_round,
    )


def trained_module(
    env: Environment | str | Path, result: RunResult, *, model: ModelFactory | None = None
) -> torch.nn.Module:
    """The classifier that a run trained, ready to predict or to save its `state_dict()`.

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
    learning: Learning | None = None,
    model: ModelFactory | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoints: Path | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Run every method `trials` times, each with its own initial model, minibatches and absences.

    A method is a name (`fedavg`, `duw-fednova`, …), a weighting rule (used with plain FedAvg), learned
    weights (used with what they were learned for), or a `Method`.
    Those with learned weights learn them once, before their trials, by `learning` or in their own way; trial i
    draws the same for every method. A folder for `checkpoints` lets an interrupted comparison go on.

    >>> import fedunfold as fu
    >>> fu.compare("digits-label-skew", [fu.size(), "fedprox"], trials=1).trials
    1
    """
    env = environment(env)
    watcher = watcher or Watcher()
    if trials < 1:
        raise InputError(f"a comparison needs at least 1 trial, not {trials}.")
    given = [methods] if isinstance(methods, str) else methods
    chosen = [_as_method(entry) for entry in given]
    if not chosen:
        raise InputError("a comparison needs at least one method, such as fedavg.")
    names = [entry.name for entry in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"method '{twice}' is named twice; name each once.")
    # Everything that can be refused is refused now, and not after hours of the methods before it.
    for entry in chosen:
        if entry.rule is None:
            check_learnable(entry.algorithm)
        else:
            _fitting(entry.rule, env, model)
    federation = SimulatedFederation(env, model=model, device=device_of(device), dtype=dtype)
    digest = digest_of(env, model)
    results = []
    for position, entry in enumerate(chosen):
        rule, algorithm = entry.rule, entry.algorithm
        if rule is None:
            how = learning or entry.learning

            def report(so_far: LearnedWeights, name: str = entry.name, how: Learning = how) -> None:
                watcher.learning(name, so_far, how.iterations)

            rule = learn_weights(
                env,
                algorithm=entry.algorithm,
                learning=how,
                model=model,
                device=device,
                dtype=dtype,
                checkpoint=checkpoints and checkpoints / f"{position}-learning.safetensors",
                on_iteration=report,
            )
            algorithm = learned_method(rule).algorithm  # with the step sizes learned beside the weights
        rule = _fitting(rule, env, model)
        runs: list[RunResult] = []
        # On a GPU all trials at once take little longer than one; otherwise each is told of as soon as it is done.
        at_once = trials if federation.device.type == "cuda" else 1
        for first in range(0, trials, at_once):
            together = [f"trial-{trial}" for trial in range(first, first + at_once)]
            outcomes = run_together(
                federation,
                rule,
                env.rounds,
                together,
                algorithm=algorithm,
                digest=digest,
                checkpoint=checkpoints and checkpoints / f"{position}-trial-{first}.safetensors",
                checkpoint_seconds=None,
            )
            for outcome in outcomes:
                watcher.trial(entry.name, len(runs), trials, outcome)
                runs.append(outcome)
        learned = rule if isinstance(rule, LearnedWeights) else None
        results.append(MethodResult(entry.name, tuple(runs), learned))
    return Comparison(env.name, trials, tuple(results))


def _as_method(given: Method | WeightingRule | Weigh | str) -> Method:
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return method(given)
    if isinstance(given, LearnedWeights):
        return learned_method(given)
    rule = as_rule(given)
    return Method(rule.name, Algorithm(), rule)


def _fitting(rule: WeightingRule, env: Environment, model: ModelFactory | None) -> WeightingRule:
    """Learned weights are refused where they were learned for another federation."""
    if not isinstance(rule, LearnedWeights):
        return rule
    return rule.applied_to(env.load().keys, env.rounds, digest_of(env, model))

"""What federated methods are held against: every client alone, all rows in one place, and no training at all.

| name     | what is trained                          | score on the test set                  | score at client k     |
|----------|------------------------------------------|----------------------------------------|-----------------------|
| local    | K models w_k, each on its client's rows  | mean of the K models'                  | that of w_k           |
| pooled   | one model on all rows                    | that of the model                      | that of the model     |
| majority | nothing: one answer, whatever the input  | that of the answer for all rows        | of its own rows       |

Training takes as many rounds, with the same epochs, minibatches, local optimiser and w^(0), as the federated runs. A
client alone is never absent and always sampled. Only a simulation can pool rows: over a network they stay where they
are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from fedunfold.config import Client, Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import LocalOptimizer
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import Task
from fedunfold.data.config import MemorySource
from fedunfold.data.datasets import DatasetRows
from fedunfold.data.federated import FederatedData
from fedunfold.data.partitions import GivenPartition
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.evaluation import evaluation_of
from fedunfold.rules.size import size
from fedunfold.tasks.classification import Classification
from fedunfold.tasks.regression import Regression
from fedunfold.tracking import Callback
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, Reference

POOLED = "pooled"
Scores = dict[str, float]
"""The primary metric by client."""


@dataclass(frozen=True)
class References:
    """The references of a federation.

    Attributes:
        federation: The clients with what they train on.
        held: The same clients with what they hold out, where they do.

    >>> import fedunfold as fu
    >>> env = fu.environment("digits-label-skew").replace(rounds=2)
    >>> found = References(fu.SimulatedFederation(env)).run("majority", "trial-0", fu.sgd())
    >>> found.is_reference, len(found.client_scores)
    (True, 5)
    """

    federation: SimulatedFederation
    held: SimulatedFederation | None = None

    def check(self, reference: Reference) -> None:
        """Refuse now what `run` would refuse."""
        if reference == "majority":
            _constant(self.federation.data.task, _targets(self.federation.data))

    def trials(
        self, entry: Method, trials: range, callbacks: Callback, checkpoint: Callable[[str], Path | None]
    ) -> tuple[RunResult, ...]:
        """Trials of a reference, each reported when it is done.

        Args:
            entry: The reference, with its name and the local optimiser.
            trials: Their numbers.
            callbacks: Called after every trial.
            checkpoint: As for `run`.
        """
        assert entry.reference is not None
        runs = []
        for trial in trials:
            outcome = self.run(entry.reference, f"trial-{trial}", entry.algorithm.local, checkpoint)
            for t, test in enumerate(outcome.evaluations):
                callbacks.on_round_end(entry.name, trial, t, test)
            callbacks.on_trial_end(entry.name, trial, len(trials), outcome)
            runs.append(outcome)
        return tuple(runs)

    def run(
        self,
        reference: Reference,
        run: str,
        optimizer: LocalOptimizer,
        checkpoint: Callable[[str], Path | None] = lambda name: None,
    ) -> RunResult:
        """One trial of a reference.

        Args:
            reference: Which.
            run: Names the randomness, as for a federated run.
            optimizer: The clients' local optimiser.
            checkpoint: The file that a part of it is resumed from, by the part's name.
        """
        if reference == "majority":
            return self._majority()
        algorithm = Algorithm(optimizer)
        if reference == "pooled":
            whole = pooled(self.federation.environment, self.federation.data)
            result = self._trained(whole, run, algorithm, checkpoint(run))
            return self._reference(result.evaluations, result.model, held_out=self._scores(self.held, result.model))
        env, data = self.federation.environment, self.federation.data
        each = [
            self._trained(alone(env, data, client.key), run, algorithm, checkpoint(f"{run}-{k}"))
            for k, client in enumerate(env.clients)
        ]
        tests = tuple(map(mean_evaluation, zip(*(result.evaluations for result in each), strict=True)))
        models = torch.stack([result.model for result in each])
        served = [self._scores(rows, models) for rows in (self.federation, self.held)]
        return self._reference(tests, models[0, :0], *served)

    def _trained(self, env: Environment, run: str, algorithm: Algorithm, checkpoint: Path | None) -> RunResult:
        """A federation of one client, which is training as anybody trains."""
        data = env.load()
        single = self.federation.over(env, data)
        (result,) = run_rounds(
            single,
            size(),
            env.rounds,
            [run],
            algorithm=algorithm,
            digest=env.digest(data),
            checkpoint=checkpoint,
            checkpoint_seconds=None,
        )
        return result

    def _reference(
        self,
        tests: Sequence[Evaluation],
        model: Tensor,
        client_scores: Scores | None = None,
        held_out: Scores | None = None,
    ) -> RunResult:
        """All clients take part in every round, and none has a weight."""
        rounds, clients = len(tests), len(self.federation.clients)
        nobody, everybody = torch.empty(rounds, 0, dtype=torch.float64), torch.ones(rounds, clients, dtype=torch.bool)
        tested, trained = held_out or {}, client_scores or {}
        return RunResult(model, nobody, everybody, tuple(tests), held_out=tested, client_scores=trained)

    def _scores(self, federation: SimulatedFederation | None, models: Tensor) -> Scores | None:
        """The primary metric of one model [d], or of each client's own [K, d], on the clients' rows, if there are
        any."""
        if federation is None:
            return None
        return dict(zip(federation.data.keys, federation.client_accuracies(models).tolist(), strict=True))

    def _majority(self) -> RunResult:
        data = self.federation.data
        task, y, tested = data.task, _targets(data), data.y_test
        outputs = _constant(task, y).expand(len(tested), -1)
        loss = float(task.losses(outputs, tested).double().mean())
        test = evaluation_of(task, task.statistics(outputs, tested), loss)
        own = [_constant(task, part) for part in torch.split(y, list(data.sizes))]
        tests = [test] * self.federation.environment.rounds
        held = None if self.held is None else _constant_scores(own, self.held.data)
        return self._reference(tests, torch.empty(0), _constant_scores(own, data), held)


def alone(env: Environment, data: FederatedData, key: str) -> Environment:
    """The federation of one client of `env` alone, which is always there.

    Args:
        env: The federation.
        data: What its clients train on.
        key: The client.

    >>> import fedunfold as fu
    >>> env = fu.environment("digits-flaky")
    >>> alone(env, env.load(), "site-b").load().keys
    ('site-b',)
    """
    (client,) = (client for client in env.clients if client.key == key)
    return _single(env, data.only(key), client.epochs)


def pooled(env: Environment, data: FederatedData) -> Environment:
    """One client with all rows, which passes over them as often as the clients of `env` pass over theirs.

    Where their epochs differ, it makes Σ_k N_k E_k^(t) / N of them in round t, rounded, and at least one.

    Args:
        env: The federation.
        data: What its clients train on.
    """
    shares = [rows / sum(data.sizes) for rows in data.sizes]
    passes = [max(1, round(sum(share * env.epochs(k, t) for k, share in enumerate(shares)))) for t in range(env.rounds)]
    return _single(env, data.pooled(POOLED), tuple(passes))


def _single(env: Environment, data: FederatedData, epochs: int | tuple[int, ...]) -> Environment:
    return env.replace(
        holdout=None,
        clock=None,
        data=MemorySource(data=data),
        partition=GivenPartition(),
        clients=(Client(key=data.keys[0], epochs=epochs),),
        clients_per_round=None,
    )


def mean_evaluation(tests: Sequence[Evaluation]) -> Evaluation:
    """The mean of several models' tests, number by number; NaN where a number of one is not known."""
    first = tests[0]
    return Evaluation(
        fmean(test.score for test in tests),
        fmean(test.loss for test in tests),
        torch.stack([test.class_accuracy for test in tests]).mean(0),
        {name: fmean(test.metrics[name] for test in tests) for name in first.metrics},
        first.primary,
    )


def _targets(data: FederatedData) -> Tensor:
    if isinstance(data.inputs, DatasetRows):
        raise InputError(
            "the reference 'majority' needs targets in memory, and they are read from data sets; leave it out."
        )
    return data.y


def _constant(task: Task, y: Tensor) -> Tensor:
    """The outputs [D] that answer every row alike: the most frequent class, or the mean of numbers.

    For classes they are log((n_c + 1)/(n + C)), whose loss is finite on a class that `y` lacks; of equally frequent
    classes the first is answered.
    """
    if isinstance(task, Classification):
        counts = torch.bincount(y, minlength=task.classes).double()
        return ((counts + 1) / (counts + 1).sum()).log()
    if isinstance(task, Regression):
        return y.double().mean(0)
    raise InputError(
        f"the reference 'majority' answers with a class or a number; leave it out for the task {task.name}."
    )


def _constant_scores(outputs: Sequence[Tensor], data: FederatedData) -> Scores:
    """The primary metric of each client's constant outputs on its rows in `data`."""
    parts, task = torch.split(data.y, list(data.sizes)), data.task
    found = [task.statistics(own.expand(len(y), -1), y) for own, y in zip(outputs, parts, strict=True)]
    return {key: task.metrics(sums)[task.primary] for key, sums in zip(data.keys, found, strict=True)}

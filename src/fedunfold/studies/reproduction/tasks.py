"""One piece of work of a study: learn an entry's weights, or run one of its trials."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.checkpoint import remove_checkpoint
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies.reproduction.records import Records
from fedunfold.studies.reproduction.studies import StudyCase, StudyRow
from fedunfold.training.learn import device_of
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import learned_method
from fedunfold.unfolding import learn


@dataclass(frozen=True)
class Task:
    """Plain data, so that it can be handed to another process. Without a trial, it is the learning."""

    case: StudyCase
    entry: StudyRow
    trial: int | None

    @property
    def name(self) -> str:
        what = "learn" if self.trial is None else f"trial {self.trial}"
        return f"{self.case.name}: {self.entry.name}, {what}"

    def done(self, records: Records) -> bool:
        if self.trial is None:
            return records.has_weights(self.case, self.entry.name, self.entry.learning)
        return records.has_trial(self.case, self.entry.name, self.trial)

    def clean_up(self, records: Records) -> None:
        """Once it is done: what a process that was killed right then could not take away."""
        remove_checkpoint(records.checkpoint(self.case, self.entry.name, self.trial))

    def ready(self, records: Records) -> bool:
        """Whether the weights that a trial needs are there."""
        if self.trial is None or self.entry.method.rule is not None:
            return True
        return records.has_weights(self.case, self.entry.weights_from or self.entry.name)

    @property
    def cost(self) -> float:
        """How long it takes, about, in clients' minibatch steps."""
        env = self.case.env
        sizes = self.case.load().sizes
        steps = [
            self.entry.rounds * client.participation_probability * env.epochs(k, 0) * size / env.batch_size
            for k, (client, size) in enumerate(zip(env.clients, sizes, strict=True))
        ]
        learning = self.entry.learning
        if self.trial is not None or learning is None:
            return sum(steps)
        return sum(steps) * learning.iterations * learning.num_samples * (4.5 if learning.adjoint == "exact" else 1.2)

    def do(self, records: Records, device: str, on_progress: Callable[[float], None]) -> None:
        """Do it and keep the record; `on_progress` hears which part of it is done."""
        began = time.monotonic()
        case, entry = self.case, self.entry
        federation = _federation(case, entry.seed_shift, device)
        if self.trial is None:
            learned = self._learn(federation, records, on_progress)
            records.keep_weights(case, entry.name, learned, time.monotonic() - began)
            return
        rule, algorithm = entry.method.rule, entry.method.algorithm
        if rule is None:
            owner = entry.weights_from or entry.name
            weights = records.weights(case, owner)
            if weights is None:
                raise InputError(f"{case.name}: {entry.name} needs the weights of {owner}, which are not there.")
            rule, algorithm = weights, learned_method(weights).algorithm
        result = run_rounds(
            federation,
            rule,
            entry.rounds,
            algorithm=algorithm,
            run=f"trial-{self.trial}",
            digest=case.digest,
            checkpoint=records.checkpoint(case, entry.name, self.trial),
            checkpoint_seconds=None,
            on_round=lambda t, _: on_progress((t + 1) / entry.rounds),
        )
        steps = client_steps(case.env, case.load(), result)
        records.keep_trial(case, entry.name, self.trial, result, steps, time.monotonic() - began)

    def _learn(
        self, federation: SimulatedFederation, records: Records, on_progress: Callable[[float], None]
    ) -> LearnedWeights:
        entry, learning = self.entry, self.entry.learning
        if learning is None:
            raise InputError(f"{self.case.name}: {entry.name} has no weights to learn.")
        return learn(
            federation,
            entry.rounds,
            algorithm=entry.method.algorithm,
            learning=learning,
            digest=self.case.digest,
            checkpoint=records.checkpoint(self.case, entry.name),
            on_iteration=lambda so_far: on_progress(len(so_far.losses) / learning.iterations),
        )


def tasks(case: StudyCase, entries: Iterable[StudyRow]) -> list[Task]:
    """Everything a case needs: the learnings first, because others wait for them."""
    listed = list(entries)
    learnings = [Task(case, entry, None) for entry in listed if entry.learning is not None]
    return learnings + [Task(case, entry, trial) for entry in listed for trial in range(entry.trials)]


def client_steps(env: Environment, data: FederatedData, result: RunResult) -> int:
    """Σ_t Σ_present τ_k^(t)."""
    per_round = [
        [env.epochs(k, t) * -(-size // env.batch_size) for k, size in enumerate(data.sizes)]
        for t in range(len(result.present))
    ]
    return int((torch.tensor(per_round) * result.present).sum())


@lru_cache(maxsize=2)
def _federation(case: StudyCase, seed_shift: int, device: str) -> SimulatedFederation:
    return case.federation(seed_shift, device_of(device))

"""One piece of work of a study: learn a row's weights, or run one of its trials."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fedunfold.core.errors import FedunfoldError, InputError
from fedunfold.core.params import device_of
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.checkpoint import remove_checkpoint
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies.cases import StudyCase, local_steps
from fedunfold.studies.processes import OnPart
from fedunfold.studies.records import StudyRecords
from fedunfold.studies.rows import StudyRow
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import learn


@dataclass(frozen=True)
class Job:
    """Plain data, so that it can be handed to another process.

    Attributes:
        case: What it is run on.
        row: What is run.
        trial: Which trial; None to learn the row's weights.
    """

    case: StudyCase
    row: StudyRow
    trial: int | None

    @property
    def name(self) -> str:
        """For messages."""
        what = "learn" if self.trial is None else f"trial {self.trial}"
        return f"{self.case.name}: {self.row.name}, {what}"

    def done(self, records: StudyRecords) -> bool:
        """Whether its record exists."""
        if self.trial is None:
            return records.has_weights(self.case, self.row.name, self.row.learning)
        return records.trial(self.case, self.row.name, self.trial) is not None

    def clean_up(self, records: StudyRecords) -> None:
        """Once it is done: remove what a process that was killed right then could not."""
        remove_checkpoint(records.checkpoint(self.case, self.row.name, self.trial))

    def ready(self, records: StudyRecords) -> bool:
        """Whether the weights that a trial needs exist."""
        if self.trial is None or self.row.method.rule is not None:
            return True
        return records.has_weights(self.case, self.row.weights_from or self.row.name)

    @property
    def cost(self) -> float:
        """How long it takes, about, in clients' minibatch steps."""
        env = self.case.env
        sizes = self.case.load().sizes
        steps = [
            self.row.rounds * client.participation_probability * env.epochs(k, 0) * size / env.batch_size
            for k, (client, size) in enumerate(zip(env.clients, sizes, strict=True))
        ]
        learning = self.row.learning
        if self.trial is not None or learning is None:
            return sum(steps)
        return sum(steps) * learning.iterations * learning.num_samples * (4.5 if learning.adjoint == "exact" else 1.2)

    def run(self, records: StudyRecords, device: str, on_part: OnPart) -> None:
        """Do it and save the record.

        Args:
            records: Where to.
            device: Where it is computed.
            on_part: Called as it proceeds.

        Raises:
            FedunfoldError: It failed; the message names it.
        """
        began = time.monotonic()
        try:
            federation = _federation(self.case, self.row.seed_shift, device)
            if self.trial is None:
                learned = self._learn(federation, records, on_part)
                records.save_weights(self.case, self.row.name, learned, time.monotonic() - began)
            else:
                result = self._train(federation, records, self.trial, on_part)
                made = local_steps(self.case.env, self.case.load(), self.row.rounds) * result.participated.numpy()
                seconds = time.monotonic() - began
                records.save_trial(self.case, self.row.name, self.trial, result, int(made.sum()), seconds)
        except FedunfoldError as error:
            raise FedunfoldError(f"{self.name}: {error}") from error

    def _learn(self, federation: SimulatedFederation, records: StudyRecords, on_part: OnPart) -> LearnedWeights:
        row, learning = self.row, self.row.learning
        if learning is None:
            raise InputError(f"{self.case.name}: {row.name} has no weights to learn.")
        return learn(
            federation,
            row.rounds,
            algorithm=row.method.algorithm,
            learning=learning,
            digest=self.case.digest,
            checkpoint=records.checkpoint(self.case, row.name),
            on_iteration=lambda so_far: on_part(len(so_far.losses) / learning.iterations),
        )

    def _train(self, federation: SimulatedFederation, records: StudyRecords, trial: int, on_part: OnPart) -> RunResult:
        case, row = self.case, self.row
        rule, algorithm = row.method.rule, row.method.algorithm
        if rule is None:
            owner = row.weights_from or row.name
            rule = records.weights(case, owner)
            if rule is None:
                raise InputError(f"{case.name}: {row.name} needs the weights of {owner}, which do not exist.")
            algorithm = rule.algorithm
        (result,) = run_rounds(
            federation,
            rule,
            row.rounds,
            [f"trial-{trial}"],
            algorithm=algorithm,
            digest=case.digest,
            checkpoint=records.checkpoint(case, row.name, trial),
            checkpoint_seconds=None,
            on_round=lambda t, _: on_part((t + 1) / row.rounds),
        )
        return result


def list_jobs(case: StudyCase, rows: Iterable[StudyRow]) -> list[Job]:
    """Everything a case needs: weights first, because trials wait for them.

    Args:
        case: What it is run on.
        rows: What is run.
    """
    listed = list(rows)
    learning = [Job(case, row, None) for row in listed if row.learning is not None]
    return learning + [Job(case, row, trial) for row in listed for trial in range(row.trials)]


@lru_cache(maxsize=2)
def _federation(case: StudyCase, seed_shift: int, device: str) -> SimulatedFederation:
    return case.federation(seed_shift, device_of(device))

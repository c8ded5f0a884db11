"""Carrying out runs, several at a time, each in a process with one thread."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from benchmarks.rule.entrants import RULE, Entrant, Noticing
from benchmarks.rule.federations import federation
from benchmarks.rule.records import Record, Records
from fedunfold.core.errors import DivergenceError, FedunfoldError
from fedunfold.core.processes import worker_pool
from fedunfold.core.task import PrimaryMetric
from fedunfold.rules.rule import for_rounds
from fedunfold.rules.unfolded import UnfoldedRule
from fedunfold.training.loop import run_rounds

REPORT_SECONDS = 15.0
DIGITS = 4
"""Scores are rounded to so many."""


@dataclass(frozen=True)
class Job:
    """One run to be made.

    Attributes:
        section: For what.
        environment: In which federation.
        entrant: By which method.
        trial: With which randomness.
    """

    section: str
    environment: str
    entrant: Entrant
    trial: int

    @property
    def key(self) -> tuple[str, str, int]:
        """That of its record."""
        return self.environment, self.entrant.label, self.trial

    def run(self) -> Record:
        """Make it. A run that leaves the finite numbers is a result too.

        Raises:
            FedunfoldError: Something does not fit together; the message names the job.
        """
        built = federation(self.section, self.environment, self.trial)
        env = built.federation.environment
        method, about = self.entrant.method(), dict(built.about)
        assert method.rule is not None
        rule = for_rounds(method.rule, env.rounds) if built.knows_horizon else method.rule
        noticing = None
        if self.section == "ablation" and self.entrant.label == RULE and isinstance(rule, UnfoldedRule):
            noticing = Noticing(rule)
        metric = PrimaryMetric.of(built.federation.data.task)
        began, scores, warnings = time.perf_counter(), [], []
        try:
            (found,) = run_rounds(
                built.federation, noticing or rule, env.rounds, [f"trial-{self.trial}"], algorithm=method.algorithm
            )
            scores = [round(metric.factor() * score, DIGITS) for score in found.scores]
            warnings = list(found.warnings)
        except DivergenceError as error:
            warnings = [str(error)]
        except FedunfoldError as error:
            raise FedunfoldError(
                f"{self.section}, {self.environment}, {self.entrant.label}, trial {self.trial}: {error}"
            ) from error
        seconds = time.perf_counter() - began
        if not all(map(math.isfinite, scores)):
            scores, warnings = [], [*warnings, "a score was not a finite number."]
        if noticing is not None and scores:
            about["features"] = noticing.summary()
        return Record(
            self.section,
            self.environment,
            self.entrant.label,
            self.trial,
            self.entrant.setting,
            metric.name,
            metric.greater_is_better,
            scores[-1] if scores else None,
            round(sum(scores) / len(scores), DIGITS) if scores else None,
            scores,
            round(seconds, 3),
            warnings,
            about,
        )


def carry_out(
    jobs: Sequence[Job], records: Records, processes: int, report: Callable[[str], None] = lambda line: None
) -> None:
    """Make the runs that have no record yet, saving as they come; how many at a time makes no difference to them.

    Args:
        jobs: The runs of a section.
        records: Where they are recorded.
        processes: How many are made at a time.
        report: Given a line now and then on how far it is.

    Raises:
        FedunfoldError: A run is refused, or a process was killed.
    """
    todo = [job for job in jobs if not records.has(job.section, job.key, job.entrant.setting)]
    progress = _Progress(len(todo), report)
    try:
        for record in _made(todo, processes):
            records.add(record)
            progress.advance(record.section)
    except BrokenProcessPool as error:
        raise FedunfoldError("a process was killed (out of memory?); run the same again to resume.") from error
    finally:
        records.save()


def _made(todo: Sequence[Job], processes: int) -> Iterator[Record]:
    if processes == 1 or len(todo) < 2:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from (job.run() for job in todo)
        finally:
            torch.set_num_threads(before)
        return
    with worker_pool(min(processes, len(todo))) as pool:
        waiting: list[Future[Record]] = [pool.submit(job.run) for job in todo]
        for made in as_completed(waiting):
            yield made.result()


class _Progress:
    """How far it is, said now and then."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self._total, self._report, self._done = total, report, 0
        self._began = self._said = time.monotonic()

    def advance(self, section: str) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said < REPORT_SECONDS and self._done < self._total:
            return
        self._said = now
        left = (now - self._began) / self._done * (self._total - self._done)
        self._report(f"{section}: {self._done} of {self._total} runs, about {left / 60:.0f} min left")

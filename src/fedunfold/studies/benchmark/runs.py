"""One piece of a benchmark's work: a run of a method with some settings, or several that a GPU carries out together."""

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.core.errors import DivergenceError, FedunfoldError, InputError
from fedunfold.core.params import device_of
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import PrimaryMetric
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.checkpoint import read_record, remove_checkpoint, write_record
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import for_rounds
from fedunfold.studies.benchmark.contenders import Contender
from fedunfold.studies.benchmark.records import TRIAL, TUNING, RunRecord, RunRecords
from fedunfold.studies.benchmark.suites import Place
from fedunfold.studies.costs import Costs, learning_costs
from fedunfold.studies.processes import OnPart
from fedunfold.training.clock import clock_for
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, learned_method
from fedunfold.unfolding import check_learnable, learn
from fedunfold.version import VERSION

DIGITS = 6
"""Scores are rounded to so many."""


@dataclass(frozen=True)
class BenchmarkRun:
    """Plain data, so that it can be handed to another process.

    Attributes:
        environment: Its name.
        place: Where.
        folder: What the place's relative paths count from.
        label: What the method is called.
        contender: The method.
        settings: Its settings.
        trials: The numbers of the runs, one on a CPU.
        tuning: Whether settings are chosen by it: its test rows are then those that clients hold out.
        run_cost: How long one takes, about, in clients' minibatch steps.
    """

    environment: str
    place: Place
    folder: Path
    label: str
    contender: Contender
    settings: str
    trials: tuple[int, ...]
    tuning: bool
    run_cost: float = 1.0

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.environment}: {self.label} {self.settings}".strip() + f", {self.runs[0]}"

    @property
    def runs(self) -> list[str]:
        """The names that stand for their randomness."""
        return [f"{TUNING if self.tuning else TRIAL}-{trial}" for trial in self.trials]

    @property
    def cost(self) -> float:
        """How long it takes, about, in clients' minibatch steps."""
        method = self._method
        learning = 1.2 * method.learning.iterations if method.rule is None and self._learns else 0.0
        return self.run_cost * (len(self.trials) + learning)

    def done(self, records: RunRecords) -> bool:
        """Whether all its records exist, and the weights that others wait for."""
        weights = self._method.rule is not None or not self._learns or self._weights_record(records).exists()
        return weights and all(self._found(records, run) for run in self.runs)

    def ready(self, records: RunRecords) -> bool:
        """Whether the weights that it needs exist, or it is the one that learns them."""
        return self._method.rule is not None or self._learns or self._weights_record(records).exists()

    def run(self, records: RunRecords, device: str, on_part: OnPart) -> None:
        """Make the runs and save their records. A run that leaves the finite numbers is a result too.

        Args:
            records: Where to.
            device: Where it is computed.
            on_part: Called as it proceeds.

        Raises:
            FedunfoldError: It failed; the message names it.
        """
        try:
            federation, refused = self._entered(device)
            began = time.monotonic()
            made = self._made(federation, refused, records, on_part)
            seconds = round((time.monotonic() - began) / len(made), 3)
            for record in made:
                records.save(replace(record, seconds=seconds))
        except FedunfoldError as error:
            raise FedunfoldError(f"{self.name}: {error}") from error

    def _federation(self, device: str, changes: Mapping[str, Any] | None = None) -> SimulatedFederation:
        draw = self.trials[0] if self.place.redraw else 0
        return _built(self.place.model_dump_json(), json.dumps(changes), self.folder, draw, self.tuning, device)

    @property
    def _method(self) -> Method:
        return self.contender.method(self.settings)

    @property
    def _learns(self) -> bool:
        """Whether weights are learned by it, where any are; other trials in the same federation wait for them."""
        return self.place.redraw or self.trials[0] == 0

    def _found(self, records: RunRecords, run: str) -> RunRecord | None:
        described = self.contender.described(self.settings)
        return records.find(self.environment, self.label, self.settings, run, described)

    def _entered(self, device: str) -> tuple[SimulatedFederation, str]:
        """The federation, and why the method cannot have its own environment there."""
        changes = dict(self.contender.environment)
        try:
            return self._federation(device, changes), ""
        except InputError as error:
            if not changes:
                raise
            return self._federation(device), str(error)

    def _made(
        self, federation: SimulatedFederation, refused: str, records: RunRecords, on_part: OnPart
    ) -> Sequence[RunRecord]:
        described = self.contender.described(self.settings)
        metric = PrimaryMetric.of(federation.data.task)
        blank = [
            RunRecord(
                self.environment,
                self.label,
                self.settings,
                described,
                run,
                metric,
                vectors=self.contender.vectors,
                parameters=len(federation.initial_model(run)),
            )
            for run in self.runs
        ]
        if refused:
            return [replace(record, ended=refused, refused=True) for record in blank]
        method = ready = self._method
        if method.rule is None:
            learned = self._learned(federation, method, records, lambda part: on_part(0.5 * part))
            if isinstance(learned, RunEnd):
                return [replace(record, ended=learned.reason, refused=learned.refused) for record in blank]
            ready = learned_method(learned, method.name)
        begun = 0.5 if method.rule is None else 0.0
        try:
            method.algorithm.aggregator.check_enough(len(federation.clients))
            results = self._results(federation, ready, self.runs, lambda part: on_part(begun + (1 - begun) * part))
        except InputError as error:
            return [replace(record, ended=str(error), refused=True) for record in blank]
        return [
            replace(record, ended=result)
            if isinstance(result, str)
            else self._filled(record, federation, method, result)
            for record, result in zip(blank, results, strict=True)
        ]

    def _results(
        self, federation: SimulatedFederation, method: Method, runs: Sequence[str], on_part: OnPart
    ) -> list[RunResult | str]:
        """Of every run what came out, or how it diverged."""
        assert method.rule is not None
        rounds, together = federation.environment.rounds, federation.max_parallel_runs
        found: list[RunResult | str] = []
        for first in range(0, len(runs), together):
            some = runs[first : first + together]

            def report(t: int, _: object, done: int = first, now: int = len(some)) -> None:
                on_part((done + now * (t + 1) / rounds) / len(runs))

            rule, algorithm = for_rounds(method.rule, rounds), method.algorithm
            clock = clock_for(federation.environment, federation.data, algorithm, rounds)
            try:
                found += run_rounds(federation, rule, rounds, some, algorithm=algorithm, clock=clock, on_round=report)
            except DivergenceError as error:
                if len(some) == 1:
                    found.append(str(error))
                else:  # which one it was, they tell one by one
                    found += [one for run in some for one in self._results(federation, method, [run], on_part)]
        return found

    def _filled(
        self, record: RunRecord, federation: SimulatedFederation, method: Method, result: RunResult
    ) -> RunRecord:
        """The record of a run that ended."""
        metric, last = record.metric, result.evaluations[-1]
        scores = [round(metric.factor() * score, DIGITS) for score in result.scores]
        if not all(map(math.isfinite, scores)):
            return replace(record, ended="a score was not a finite number.")
        shown = metric.shown(last.score, last.metrics)
        if (name := self.place.choose_by or metric.name) not in shown:
            raise InputError(f"the task has no metric '{name}' to choose by; take one of {', '.join(shown)}.")
        counts = [int(count) for count in result.participated.sum(1)]
        learning = {}
        if method.rule is None:
            run = Costs(len(counts), 0, sum(counts), 2 * sum(counts))
            cost = learning_costs(federation.environment, federation.data.sizes, method.algorithm, method.learning, run)
            learning = {"rounds": cost.rounds, "megabytes": cost.megabytes(record.parameters)}
        return replace(
            record,
            scores=scores,
            judged=_signed(shown[name], greater_is_better=name != metric.name or metric.greater_is_better),
            participations=counts,
            clients={} if self.tuning else _on_clients(federation, metric, result),
            learning=learning,
            warnings=list(result.warnings),
        )

    # --- weights that are learned -----------------------------------------------------------------------------

    def _weights_record(self, records: RunRecords) -> Path:
        """Says how learning went; the weights are beside it."""
        described = sha256(f"{self.contender.described(self.settings)} {VERSION}".encode()).hexdigest()[:12]
        which = self.runs[0] if self.place.redraw else TUNING if self.tuning else TRIAL
        folder = records.place(self.environment, self.label, self.settings)
        return folder / f"weights.{which}.{described}.json"

    def _learned(
        self, federation: SimulatedFederation, method: Method, records: RunRecords, on_part: OnPart
    ) -> "LearnedWeights | RunEnd":
        """Weights for the federation, learned where they are not yet, or why there are none."""
        about = self._weights_record(records)
        file, checkpoint = about.with_suffix(".safetensors"), about.with_suffix(".checkpoint.safetensors")
        if not about.exists():
            ended = RunEnd("")
            try:
                check_learnable(method.algorithm)
            except InputError as error:
                ended = RunEnd(str(error), refused=True)
            if not ended.refused:
                try:
                    learned = learn(
                        federation,
                        federation.environment.rounds,
                        algorithm=method.algorithm,
                        learning=method.learning,
                        digest=federation.environment.digest(federation.data),
                        checkpoint=checkpoint,
                        on_iteration=lambda so_far: on_part(len(so_far.losses) / method.learning.iterations),
                    )
                    learned.save(file)
                except DivergenceError as error:
                    ended = RunEnd(str(error))
            write_record(about, asdict(ended))
            remove_checkpoint(checkpoint)
        ended = RunEnd(**read_record(about, {"reason", "refused"}))
        return ended if ended.reason else LearnedWeights.load(file)


@dataclass(frozen=True)
class RunEnd:
    """Why a method has no result.

    Attributes:
        reason: In a sentence; nothing where it has one.
        refused: Whether it cannot be run here; else it diverged.
    """

    reason: str
    refused: bool = False


def _signed(value: float | None, *, greater_is_better: bool) -> float | None:
    return value if value is None or greater_is_better else -value


def _on_clients(federation: SimulatedFederation, metric: PrimaryMetric, result: RunResult) -> dict[str, float]:
    """How the final model serves the clients on their own training data; nothing where that is not defined."""
    scores = metric.factor() * federation.client_accuracies(result.model).double().numpy()
    return fairness(scores[np.isfinite(scores)].tolist(), greater_is_better=metric.greater_is_better)


def fairness(scores: Sequence[float], *, greater_is_better: bool = True) -> dict[str, float]:
    """Mean, standard deviation (n) and mean of the worst tenth, rounded up, of clients' scores.

    >>> fairness([90.0, 70.0, 80.0])
    {'mean': 80.0, 'sd': 8.164966, 'worst': 70.0}
    """
    if not scores:
        return {}
    worst = sorted(scores, reverse=not greater_is_better)[: -(-len(scores) // 10)]
    found = {"mean": statistics.fmean(scores), "sd": statistics.pstdev(scores), "worst": statistics.fmean(worst)}
    return {name: round(value, DIGITS) for name, value in found.items()}


@lru_cache(maxsize=2)
def _built(place: str, changes: str, folder: Path, draw: int, tuning: bool, device: str) -> SimulatedFederation:
    """The federation, made where the run is: a job that held its data would be heavy to hand over and to store."""
    case = Place(**json.loads(place)).case(folder, draw, tuning=tuning, changes=json.loads(changes))
    return case.federation(0, device_of(device))

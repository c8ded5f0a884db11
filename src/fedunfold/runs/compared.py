"""A comparison as a report reads it from a folder, before it is in one."""

import numpy as np

from fedunfold.config import Environment
from fedunfold.runs.influence import Influence
from fedunfold.runs.labels import distinct, plain
from fedunfold.runs.schema import FederationRecord, Floats, MethodRecord, MetricRecord, RunRecord
from fedunfold.training.comparison import Comparison, MethodResult


def run_of(environment: Environment, comparison: Comparison) -> RunRecord:
    """The record of a comparison; how models do on the clients' training data is not in it.

    Args:
        environment: What the methods were compared on.
        comparison: With at least one method.
    """
    federation = FederationRecord.of(environment)
    results = comparison.methods
    names = distinct([plain(result.name) for result in results])
    return RunRecord(
        label=plain(environment.name),
        environment=plain(environment.name),
        settings={},
        clients=distinct([plain(key) for key in federation.keys]),
        classes=distinct([plain(environment.class_name(label)) for label in range(federation.classes)]),
        federation=federation,
        methods=tuple(_method(name, result, federation) for name, result in zip(names, results, strict=True)),
        learned={n: result.learned for n, result in zip(names, results, strict=True) if result.learned is not None},
        primary=MetricRecord.model_validate(comparison.primary.describe()).primary,
    )


def _method(name: str, result: MethodResult, federation: FederationRecord) -> MethodRecord:
    trials, factor = result.trials, result.primary.factor()
    rounds = min(len(trial.weights) for trial in trials)  # a trial that was stopped early has fewer
    weights = np.mean([trial.weights[:rounds].double().numpy() for trial in trials], axis=0)

    def by_client(what: str) -> Floats | None:
        found = [getattr(trial, what) for trial in trials]
        if not all(found):
            return None
        return factor * np.array([[own.get(key, np.nan) for key in federation.keys] for own in found], dtype=float)

    return MethodRecord(
        name=name,
        scores=factor * np.array(result.curves, dtype=float),
        class_accuracy=100 * np.array([trial.evaluations[-1].class_accuracy.tolist() for trial in trials], dtype=float),
        weights=weights,
        client_scores=np.full((len(trials), len(federation.clients)), np.nan),
        held_out=by_client("held_out"),
        fine_tuned=by_client("fine_tuned"),
        influence=None
        if result.is_reference
        else Influence.of([t.weights.tolist() for t in trials], [t.participated.tolist() for t in trials]),
    )

"""Records of runs, made up small enough to work out by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.report.grouping import Group
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.schema import ClientRecord, FederationRecord, MethodRecord, RunRecord
from fedunfold.version import VERSION

KEYS = ("north", "south")


def federation(
    counts: Sequence[Sequence[int]] = ((6, 2, 0), (0, 2, 10)),
    participation_probability: Sequence[float] = (1.0, 1.0),
    epochs: Sequence[int] = (1, 1),
    keys: Sequence[str] = KEYS,
    name: str = "two-sites",
    class_names: tuple[str, ...] | None = None,
    test_samples: int = 30,
    held_out: Sequence[int] = (0, 0),
) -> FederationRecord:
    """North alone has class 0, south alone class 2; 8 and 12 samples, shares of 0.4 and 0.6."""
    return FederationRecord(
        environment=name,
        digest="d1",
        classes=len(counts[0]),
        class_names=class_names,
        test_samples=test_samples,
        rounds=2,
        clients=tuple(
            ClientRecord(
                key=key,
                samples=sum(row),
                label_counts=tuple(row),
                epochs=e,
                participation_probability=r,
                held_out=own,
            )
            for key, row, e, r, own in zip(keys, counts, epochs, participation_probability, held_out, strict=True)
        ),
    )


def method(
    name: str,
    accuracy: Sequence[Sequence[float]],
    by_class: Sequence[float] = (50.0, 50.0, 50.0),
    by_client: Sequence[float] = (50.0, 50.0),
    held_out: Sequence[Sequence[float]] | None = None,
    reference: bool = False,
) -> MethodRecord:
    """Accuracies [trials][rounds]; those by class and by client are the same in every trial."""
    trials, rounds = len(accuracy), len(accuracy[0])
    return MethodRecord(
        name,
        np.array(accuracy, dtype=float),
        np.array([by_class] * trials, dtype=float),
        np.empty((rounds, 0)) if reference else np.full((rounds, 2), 0.5),
        np.array([by_client] * trials, dtype=float),
        held_out=None if held_out is None else np.array(held_out, dtype=float),
    )


def learned(
    weights: Sequence[Sequence[float]] = ((0.5, 0.5), (0.7, 0.3)),
    losses: Sequence[float] = (4.0, 3.0),
    keys: Sequence[str] = KEYS,
) -> LearnedWeights:
    """Weights that were equal until the last outer iteration."""
    final = torch.tensor(weights, dtype=torch.float64)
    start = torch.full_like(final, 1 / len(keys))
    history = torch.stack([*[start] * len(losses), final])
    return LearnedWeights(tuple(keys), final, torch.tensor(losses, dtype=torch.float64), history, {}, "d1")


def run(
    *methods: MethodRecord,
    label: str = "first",
    weights: Mapping[str, LearnedWeights] | None = None,
    of: FederationRecord | None = None,
    primary: PrimaryMetric = ACCURACY,
) -> RunRecord:
    record = of or federation()
    return RunRecord(
        label=label,
        environment=record.environment,
        settings={"command": "compare", "trials": 2, "files": []},
        clients=record.keys,
        classes=record.class_names or tuple(str(label) for label in range(record.classes)),
        federation=record,
        methods=methods,
        learned=weights or {},
        primary=primary,
    )


def group(*methods: MethodRecord, **more: Any) -> Group:
    return Group((run(*methods, **more),))


def write_run(
    folder: Path,
    command: str = "compare",
    name: str = "two-sites",
    keys: Sequence[str] = KEYS,
    methods: Sequence[str] = ("fedavg", "duw-fedavg"),
    class_names: tuple[str, ...] | None = None,
    **settings: Any,
) -> Path:
    """A run's folder as a command leaves it: two trials of two rounds, and weights of the last method."""
    folder.mkdir(parents=True)
    files = ["duw.safetensors"]
    learned(keys=keys).save(folder / "duw.safetensors")
    (folder / "federation.json").write_text(federation(keys=keys, name=name, class_names=class_names).model_dump_json())
    if command != "learn":
        lines = [
            {
                "method": method,
                "trial": trial,
                "round": t,
                "accuracy": 40.0 + 10 * number + t,
                "loss": 1.0,
                "class_accuracy": [90.0, None, 10.0 + 20 * number],
                "weights": [0.4, 0.6],
                "participated": [True, True],
            }
            for number, method in enumerate(methods)
            for trial in range(2)
            for t in range(2)
        ]
        ends = [
            {"method": method, "trial": trial, "client_scores": [80.0, 30.0 + 20 * number]}
            for number, method in enumerate(methods)
            for trial in range(2)
        ]
        for file, records in (("metrics.jsonl", lines), ("client_scores.jsonl", ends)):
            (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
            files.append(file)
    content = {"command": command, "environment": name, "version": VERSION, "seed": 0, "files": files, **settings}
    (folder / "settings.json").write_text(json.dumps(content))
    return folder

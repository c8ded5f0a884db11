"""The page's tables, as text in rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedunfold.core.task import words
from fedunfold.report.grouping import Group, LabelledMethod
from fedunfold.report.insights import ended, worst_client
from fedunfold.report.learning import epochs_of
from fedunfold.runs.labels import plain
from fedunfold.runs.schema import ClientRecord, FederationRecord, Floats, RunRecord
from fedunfold.tracking.scalars import leaves
from fedunfold.training.comparison import BALANCED

MOST_ROWS = 500
MOST_LABELS = 8
MOST_LEARNED = 3  # columns of learned weights beside the clients
NONE = "–"


@dataclass(frozen=True)
class Table:
    """Rows under a header.

    Attributes:
        header: The columns' names.
        rows: A cell for each column.
        words: The columns that are read rather than compared, and stand to the left.
        left_out: How many rows are not shown.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...] = (0,)
    left_out: int = 0


def outcome_table(groups: Sequence[Group]) -> Table | None:
    """A line for every method of every run."""
    tested = [group for group in groups if group.methods]
    if not tested:
        return None
    metrics = {group.first.primary for group in tested}
    hidden = {tested[0].first.primary.name} | (set() if tested[0].first.federation.classes == 2 else {BALANCED})
    others = [name for name in (tested[0].methods[0].metrics if len(metrics) == 1 else ()) if name not in hidden]
    rows = [_outcome(method, group, len(groups) > 1, others) for group in tested for method in group.methods]
    score = f"test {tested[0].first.primary.label}" if len(metrics) == 1 else "test score"
    header = ("method", "trials", score, "difference", *map(words, others), "weakest class", "worst-served client")
    used = [i for i in range(len(header)) if header[i] != "weakest class" or any(row[i] != NONE for row in rows)]
    return Table(tuple(header[i] for i in used), tuple(tuple(row[i] for i in used) for row in rows))


def _outcome(method: LabelledMethod, group: Group, several: bool, others: Sequence[str]) -> tuple[str, ...]:
    base, primary = group.baseline, group.first.primary
    by_class, worst = method.class_accuracy.mean(0), worst_client(method)
    difference = NONE
    if base is not None and base is not method:
        value = float(method.finals.mean() - base.finals.mean())
        difference = f"{value:+.1f}" if primary.is_percentage else f"{value:+.4g}"
        difference = difference.replace("-", "−")
    weakest = NONE
    if not np.isnan(by_class).all():
        weakest = f"{np.nanmin(by_class):.1f} % (class {group.first.classes[np.nanargmin(by_class)]})"
    served = NONE
    if worst is not None:
        served = f"{primary.text(worst.score)}{primary.unit()} ({group.first.clients[worst.client]})"
    more = [_metric(method, name) for name in others]
    name = f"{method.label} · {group.first.environment}" if several else method.label
    return name, str(len(method.finals)), ended(method), difference, *more, weakest, served


def _metric(method: LabelledMethod, name: str) -> str:
    """The mean of one of the other metrics over the trials."""
    primary, values = method.run.primary, method.metrics.get(name)
    if values is None or np.isnan(values).any():
        return NONE
    return primary.text(float(values.mean()), name) + primary.unit(name)


def facts(federation: FederationRecord) -> list[tuple[str, str]]:
    """The federation in numbers."""
    found = [
        (f"{len(federation.clients):,}", "clients"),
        (f"{sum(client.samples for client in federation.clients):,}", "training samples"),
        (f"{federation.test_samples:,}", "test samples"),
        (f"{federation.classes:,}", "classes") if federation.classes > 1 else (plain(federation.task), "task"),
        (f"{federation.rounds:,}", "rounds"),
    ]
    if federation.clients_per_round is not None:
        found.append((f"{federation.clients_per_round:,}", "clients drawn a round"))
    return found


def client_table(group: Group) -> Table:
    """Who holds how much of what, how fast and how reliable, and how much it counts."""
    federation = group.first.federation
    learned = {
        f"{name} · {run.label}" if len(group.runs) > 1 else name: weights.weights.mean(0).tolist()
        for run in group.runs
        for name, weights in run.learned.items()
    }
    learned = dict(list(learned.items())[:MOST_LEARNED])
    clients = federation.clients
    columns = {
        "client": group.first.clients,
        **({"labels": [_held(client, group.first.classes) for client in clients]} if federation.classes > 1 else {}),
        "samples": [f"{client.samples:,}" for client in clients],
        "by size": [f"{share:.3f}" for share in federation.shares],
    }
    for name, weights in learned.items():
        head = "learned" if len(learned) == 1 else f"learned ({name})"
        columns[head] = [f"{weight:.3f}" for weight in weights]
    columns["pace"] = [epochs_of(client.epochs) for client in clients]
    columns["reachable"] = [f"{100 * client.participation_probability:.0f} %" for client in clients]
    rows, read = tuple(zip(*columns.values(), strict=True)), (0, 1) if federation.classes > 1 else (0,)
    return Table(tuple(columns), rows[:MOST_ROWS], read, max(0, len(rows) - MOST_ROWS))


def _held(client: ClientRecord, classes: Sequence[str]) -> str:
    if len(client.held) == len(client.label_counts):
        return "all"
    more = f", … ({len(client.held)})" if len(client.held) > MOST_LABELS else ""
    return ", ".join(classes[label] for label in client.held[:MOST_LABELS]) + more


def numbers_table(
    first: str, names: Sequence[str], columns: Mapping[str, Floats], text: Callable[[float], str]
) -> Table:
    """A chart's numbers; a column that is shorter than the others ends early.

    Args:
        first: The first column's head.
        names: What is in it.
        columns: The numbers by the heads of the other columns.
        text: How a number is written.
    """
    rows = tuple(
        (name, *(_number(values[i], text) if i < len(values) else NONE for values in columns.values()))
        for i, name in enumerate(names[:MOST_ROWS])
    )
    return Table((first, *columns), rows, left_out=max(0, len(names) - MOST_ROWS))


def _number(value: float, text: Callable[[float], str]) -> str:
    return NONE if np.isnan(value) else text(value)


def settings_table(run: RunRecord) -> Table:
    """settings.json line by line, the digest that stands for the federation, and how weights were learned."""
    digest = {"federation digest": run.federation.digest}
    own = {name: value for name, value in run.settings.items() if name != "files"}
    learned = {name: weights.settings for name, weights in run.learned.items()}
    rows = [
        (plain(name), plain(", ".join(map(_word, value)) if isinstance(value, list) else _word(value)))
        for settings in (digest, own, learned)
        for name, value in leaves(settings)
        if value is not None
    ]
    return Table(("setting", "value"), tuple(rows[:MOST_ROWS]), words=(0, 1), left_out=max(0, len(rows) - MOST_ROWS))


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "…" if isinstance(value, dict | list) else str(value)

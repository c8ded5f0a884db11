"""Leave-one-client-out: how well the others' model does on a client that took no part."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedunfold.api import compare
from fedunfold.config import Environment, environment
from fedunfold.core.errors import InputError
from fedunfold.core.task import PrimaryMetric, finite
from fedunfold.core.text_table import TextTable
from fedunfold.data.config import MemorySource
from fedunfold.data.partitions import GivenPartition
from fedunfold.rules.rule import Weigh, WeightingRule
from fedunfold.training.comparison import Comparison
from fedunfold.training.methods import Method


@dataclass(frozen=True)
class LeftOut:
    """What every method reaches on each client, trained without it. Displayed by itself it is a table.

    Attributes:
        environment: The environment's name.
        comparisons: By the client that was left out, the comparison on its rows.
    """

    environment: str
    comparisons: Mapping[str, Comparison]

    @property
    def primary(self) -> PrimaryMetric:
        """What the scores are."""
        return next(iter(self.comparisons.values())).primary

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """By method and client left out, the mean over the trials, fractions in percent."""
        names = [method.name for method in next(iter(self.comparisons.values())).methods]
        return {
            name: {key: found.methods[i].mean for key, found in self.comparisons.items()}
            for i, name in enumerate(names)
        }

    def as_json(self) -> dict[str, Any]:
        """Plain values; fractions in percent."""
        return {
            "environment": self.environment,
            "trials": next(iter(self.comparisons.values())).trials,
            "metric": self.primary.describe(),
            "methods": [self._row(name, scores) for name, scores in self.scores.items()],
        }

    def _row(self, name: str, scores: Mapping[str, float]) -> dict[str, Any]:
        known = {key: score for key, score in scores.items() if finite(score) is not None}
        worst = min(known, key=lambda key: self.primary.gain(known[key], over=0), default=None)
        return {
            "method": name,
            f"{self.primary.name}_mean": statistics.fmean(known.values()) if known else None,
            "worst": None if worst is None else known[worst],
            "worst_client": worst,
            "left_out": {key: finite(score) for key, score in scores.items()},
        }

    @property
    def title(self) -> str:
        """What the table shows."""
        primary = self.primary
        about = f"{primary.label} on each client, trained without it{primary.brackets()}{primary.direction}"
        return f"{self.environment}: {about}"

    def rows(self) -> list[tuple[str, ...]]:
        """A line for each method: the mean of the clients, the worst, and each of them."""
        rows = self.as_json()["methods"]
        labels = [method.label for method in next(iter(self.comparisons.values())).methods]
        return [
            (
                label,
                *map(self._text, (row[f"{self.primary.name}_mean"], row["worst"], *row["left_out"].values())),
            )
            for label, row in zip(labels, rows, strict=True)
        ]

    @property
    def heads(self) -> tuple[str, ...]:
        """Of the columns."""
        return "method", "mean", "worst", *self.comparisons

    def _text(self, value: float | None) -> str:
        return "–" if value is None else self.primary.text(value)

    def __repr__(self) -> str:
        return TextTable(self.title, self.heads, self.rows()).text()

    def _repr_html_(self) -> str:
        return TextTable(self.title, self.heads, self.rows()).html()


def without_client(env: Environment, key: str) -> Environment:
    """The federation of the other clients, tested on this one's rows.

    Args:
        env: The federation.
        key: The client.

    Raises:
        InputError: There is no such client, or no other.

    >>> import fedunfold as fu
    >>> rest = without_client(fu.environment("digits-label-skew"), "site-b")
    >>> rest.load().keys
    ('site-a', 'site-c', 'site-d', 'site-e')
    """
    others = tuple(client for client in env.clients if client.key != key)
    if len(others) in (0, len(env.clients)):
        raise InputError(f"client {key} cannot be left out of {env.name}; name one of several clients.")
    data = env.replace(holdout=None, server_rows=None).load()
    return env.replace(
        name=f"{env.name} without {key}",
        holdout=None,
        data=MemorySource(data=data.without(key)),
        partition=GivenPartition(),
        clients=others,
        clients_per_round=env.clients_per_round and min(env.clients_per_round, len(others)),
    )


def leave_one_out(
    env: Environment | str | Path,
    methods: Sequence[Method | WeightingRule | Weigh | str],
    *,
    checkpoints: Path | None = None,
    **options: Any,
) -> LeftOut:
    """Compare methods once for every client: trained without it, tested on its rows.

    Weights are learned anew without each client. What the environment has as a test set is not used.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        methods: As for `compare`.
        checkpoints: A folder from which an interrupted comparison is resumed.
        **options: What else `compare` takes (`trials`, `learning`, `model`, `device`, `dtype`, `callback`), for every
            client.

    Returns:
        The comparisons.

    Raises:
        InputError: There is one client, or `compare` refuses a method.
        DivergenceError: Training left the finite numbers.

    >>> import fedunfold as fu
    >>> found = leave_one_out("digits-label-skew", ["fedavg"], trials=1)
    >>> list(found.scores["fedavg"])
    ['site-a', 'site-b', 'site-c', 'site-d', 'site-e']
    """
    env = environment(env)
    rest = {client.key: without_client(env, client.key) for client in env.clients}
    comparisons = {}
    for k, (key, others) in enumerate(rest.items()):
        saved = checkpoints and checkpoints / f"without-{k}"
        if saved is not None:
            saved.mkdir(exist_ok=True)
        comparisons[key] = compare(others, methods, checkpoints=saved, **options)
    return LeftOut(env.name, comparisons)

"""What a comparison of methods found."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedunfold.core.messages import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import ACCURACY, PrimaryMetric, finite, words
from fedunfold.core.text_table import TextTable
from fedunfold.rules.learned import LearnedWeights

BALANCED = "balanced_accuracy"


@dataclass(frozen=True)
class MethodResult:
    """The runs of a method.

    Attributes:
        name: The method's name.
        trials: A run for each trial.
        learned: The weights it learned, if any.
    """

    name: str
    trials: tuple[RunResult, ...]
    learned: LearnedWeights | None = None

    @property
    def primary(self) -> PrimaryMetric:
        """What the scores are."""
        return self.trials[0].evaluations[-1].primary

    @property
    def finals(self) -> list[float]:
        """Score after the last round of every trial, fractions in percent."""
        return [self.primary.factor() * trial.scores[-1] for trial in self.trials]

    @property
    def mean(self) -> float:
        """Mean over the trials of the score after the last round, fractions in percent."""
        return statistics.fmean(self.finals)

    @property
    def sd(self) -> float:
        """Standard deviation over the trials (n − 1); 0 for a single one."""
        return statistics.stdev(self.finals) if len(self.trials) > 1 else 0.0

    @property
    def learning_rounds(self) -> int:
        """How many rounds of the federation were spent on learning weights before the first trial."""
        return 0 if self.learned is None else len(self.learned.losses) * len(self.learned.weights)

    @property
    def spread(self) -> str:
        """Mean and standard deviation for a table; the value alone where there is one."""
        return self.primary.spread(self.mean, self.sd) if len(self.trials) > 1 else self.primary.text(self.mean)

    def as_row(self) -> dict[str, Any]:
        """Plain values for a table."""
        name = self.primary.name
        spread = {f"{name}_mean": finite(self.mean), f"{name}_sd": finite(self.sd)}
        return {"method": self.name, **spread, "metrics": self.metrics}

    @property
    def metrics(self) -> dict[str, float | None]:
        """Means over the trials of all metrics after the last round, fractions in percent; None where one is not known
        in every trial."""
        last = [trial.evaluations[-1] for trial in self.trials]
        found = [evaluation.primary.shown(evaluation.score, evaluation.metrics) for evaluation in last]
        return {name: _mean([metrics[name] for metrics in found]) for name in found[0]}

    @property
    def warnings(self) -> list[str]:
        """What was odd about learning the weights, and about each trial."""
        learned = [] if self.learned is None else self.learned.warnings
        return [*learned, *(f"trial {i}: {line}" for i, trial in enumerate(self.trials) for line in trial.warnings)]

    @property
    def curves(self) -> list[list[float]]:
        """Score after every round, as a fraction where it is one, of every trial; one that stopped early stays at its
        last."""
        rounds = max(len(trial.scores) for trial in self.trials)
        return [trial.scores + trial.scores[-1:] * (rounds - len(trial.scores)) for trial in self.trials]

    @property
    def rounds(self) -> list[float]:
        """Mean score after every round, fractions in percent."""
        return [self.primary.factor() * statistics.fmean(values) for values in zip(*self.curves, strict=True)]

    @property
    def worst_class(self) -> float | None:
        """Mean over the trials of the accuracy on the class that fares worst after the last round, in percent; None
        without classes."""
        last = [trial.evaluations[-1].class_accuracy.nan_to_num(1) for trial in self.trials]
        return 100 * statistics.fmean(float(each.min()) for each in last) if len(last[0]) else None

    @property
    def held_out(self) -> dict[str, float | None]:
        """Mean over the trials of the score on what each client held out, by client, fractions in percent; None where a
        client's is not known."""
        each = [trial.held_out for trial in self.trials]
        return {key: _mean([finite(self.primary.factor() * own[key]) for own in each]) for key in each[0]}

    @property
    def client_mean(self) -> float | None:
        """Mean over the clients of the scores on what they held out, of those that are known."""
        known = [score for score in self.held_out.values() if score is not None]
        return statistics.fmean(known) if known else None

    @property
    def worst_client(self) -> tuple[str, float] | None:
        """The client with the worst score on what it held out, and this score."""
        known = {key: score for key, score in self.held_out.items() if score is not None}
        worst = min(known, key=lambda key: self.primary.gain(known[key], over=0), default=None)
        return None if worst is None else (worst, known[worst])

    def __repr__(self) -> str:
        return f"MethodResult(name={self.name!r}, trials={len(self.trials)}, {self.primary.name}={self.spread})"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. Displayed by itself it is a table, in a terminal and in a notebook.

    Attributes:
        environment: The environment's name.
        trials: How many runs each method has.
        methods: A result for each method.

    >>> import fedunfold as fu
    >>> table = fu.compare("digits-label-skew", ["fedavg", "uniform-fedavg"], trials=1)
    >>> [method.name for method in table.methods]
    ['fedavg', 'uniform-fedavg']
    >>> table.records()[0].keys()
    dict_keys(['method', 'trial', 'round', 'accuracy', 'loss', 'balanced_accuracy'])
    """

    environment: str
    trials: int
    methods: tuple[MethodResult, ...] = field(default=())

    def records(self) -> list[dict[str, Any]]:
        """A row for every method, trial and round (from 1), with the test's loss and metrics, fractions in percent.

        `pandas.DataFrame(table.records())` is the long form that most plotting and statistics start from.
        """
        return [
            {
                "method": result.name,
                "trial": trial,
                "round": t + 1,
                **_row(evaluation),
            }
            for result in self.methods
            for trial, run in enumerate(result.trials)
            for t, evaluation in enumerate(run.evaluations)
        ]

    @property
    def primary(self) -> PrimaryMetric:
        """What the scores are."""
        return self.methods[0].primary if self.methods else ACCURACY

    @property
    def other_metrics(self) -> dict[str, list[str]]:
        """What stands beside the primary metric in a table, by column: a text for each method.

        "mean client" and "worst client" are of the scores on what clients held out, where they did. The class that
        fares worst says more than the mean of the classes' accuracies and stands in its place.
        """
        if not self.methods:
            return {}
        primary, columns = self.primary, {}
        for name in self.methods[0].metrics:
            if name not in (primary.name, BALANCED):
                values = [method.metrics.get(name) for method in self.methods]
                shown = ["–" if value is None else primary.text(value, name) for value in values]
                columns[words(name) + primary.brackets(name)] = shown
        worst = [method.worst_class for method in self.methods]
        if None not in worst:
            columns["worst class (%)"] = [f"{value:.1f}" for value in worst]
        means, clients = [m.client_mean for m in self.methods], [m.worst_client for m in self.methods]
        if None not in means:
            percent = primary.brackets()
            columns[f"mean client{percent}"] = [primary.text(mean) for mean in means if mean is not None]
            columns[f"worst client{percent}"] = [f"{primary.text(own[1])} {own[0]}" for own in clients if own]
        return columns

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> TextTable:
        primary, others = self.primary, self.other_metrics
        of_methods = zip(*others.values(), strict=True) if others else [()] * len(self.methods)
        unit = primary.brackets()
        return TextTable(
            f"{self.environment}: {primary.label} on the test set after the last round{unit}{primary.direction}",
            ("method", "trials", "mean ± sd", *(head.removesuffix(unit) for head in others)),
            [(m.name, str(len(m.trials)), m.spread, *cells) for m, cells in zip(self.methods, of_methods, strict=True)],
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; fractions in percent."""
        return {
            "environment": self.environment,
            "trials": self.trials,
            "metric": self.primary.describe(),
            "methods": [
                {**result.as_row(), **_on_clients(result), "rounds": list(map(finite, result.rounds))}
                | {"warnings": result.warnings}
                for result in self.methods
            ],
        }


def _row(evaluation: Evaluation) -> dict[str, float | None]:
    """The primary metric, the loss, and the other metrics."""
    shown = evaluation.primary.shown(evaluation.score, evaluation.metrics)
    return {evaluation.primary.name: shown.pop(evaluation.primary.name), "loss": evaluation.loss} | shown


def _on_clients(result: MethodResult) -> dict[str, Any]:
    """What clients held out, where they did."""
    if not result.held_out:
        return {}
    worst = result.worst_client
    summary = {"mean": result.client_mean, "worst": worst and worst[1], "worst_client": worst and worst[0]}
    return {"held_out": {**summary, "clients": result.held_out}}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None

"""What a comparison of methods found."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import ACCURACY, PrimaryMetric, finite, words
from fedunfold.core.text_table import TextTable
from fedunfold.rules.learned import LearnedWeights

BALANCED = "balanced_accuracy"
MOST_CLIENTS = 8
"""As many have a column of their own."""


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
    def is_reference(self) -> bool:
        """Whether it is what federated methods are held against, and none itself."""
        return self.trials[0].is_reference

    @property
    def label(self) -> str:
        """Its name in a table, which says what is a reference."""
        return f"{self.name} (reference)" if self.is_reference else self.name

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
    def times(self) -> list[float]:
        """When every round ended, in simulated seconds, as a mean over the trials that made it; empty without time."""
        rounds = max(len(trial.times) for trial in self.trials)
        return [
            statistics.fmean(trial.times[t] for trial in self.trials if t < len(trial.times)) for t in range(rounds)
        ]

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
        return self._by_client([trial.held_out for trial in self.trials])

    @property
    def fine_tuned(self) -> dict[str, float | None]:
        """The same after every client has trained the final model further for itself; empty where that was not
        requested."""
        return self._by_client([trial.fine_tuned for trial in self.trials])

    @property
    def client_mean(self) -> float | None:
        """Mean over the clients of the scores on what they held out, of those that are known."""
        return _mean_and_worst(self.held_out, self.primary)[0]

    @property
    def worst_client(self) -> tuple[str, float] | None:
        """The client with the worst score on what it held out, and this score."""
        return _mean_and_worst(self.held_out, self.primary)[1]

    def _by_client(self, each: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
        """Means over the trials, fractions in percent; None for what is not known in every trial."""
        return {key: _mean([finite(self.primary.factor() * own[key]) for own in each]) for key in each[0]}

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

        With a clock also when the round ended, in simulated seconds.

        `pandas.DataFrame(table.records())` is the long form that most plotting and statistics start from.
        """
        return [
            {
                "method": result.name,
                "trial": trial,
                "round": t + 1,
                **_row(evaluation),
                **({"time": run.times[t]} if run.times else {}),
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
    def has_times(self) -> bool:
        """Whether there is a simulated time for any method."""
        return any(trial.times for method in self.methods for trial in method.trials)

    @property
    def other_metrics(self) -> dict[str, list[str]]:
        """What stands beside the primary metric in a table, by column: a text for each method.

        Of several classes the one that fares worst says more than the mean of their accuracies and stands in its place;
        of two there are both.
        """
        if not self.methods:
            return {}
        primary, columns = self.primary, {}
        classes = len(self.methods[0].trials[0].evaluations[-1].class_accuracy)
        hidden = (primary.name,) if classes == 2 else (primary.name, BALANCED)
        for name in self.methods[0].metrics:
            if name not in hidden:
                values = [method.metrics.get(name) for method in self.methods]
                shown = ["–" if value is None else primary.text(value, name) for value in values]
                columns[words(name) + primary.brackets(name)] = shown
        if self.has_times:
            ends = [[trial.times[-1] for trial in method.trials if trial.times] for method in self.methods]
            columns["simulated time (s)"] = [f"{statistics.fmean(own):.4g}" if own else "–" for own in ends]
        weakest = [method.worst_class for method in self.methods]
        if None not in weakest:
            columns["worst class (%)"] = [f"{value:.1f}" for value in weakest]
        return columns

    @property
    def by_client(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]] | None:
        """A table of the scores on what clients held out: its title, heads and rows; None where they held out nothing.

        Every method has a row, and one more for its fine-tuned models, where there are some: the mean of the clients,
        the worst of them, and each one where they are few, or else which one is the worst.
        """
        scored = [
            (label, scores)
            for method in self.methods
            for label, scores in ((method.label, method.held_out), (f"{method.name}, fine-tuned", method.fine_tuned))
            if scores
        ]
        if not scored:
            return None
        clients = tuple(scored[0][1]) if len(scored[0][1]) <= MOST_CLIENTS else ()
        primary, rows = self.primary, []
        for label, scores in scored:
            mean, worst = _mean_and_worst(scores, primary)
            low = "–" if worst is None else primary.text(worst[1]) + ("" if clients else f" {worst[0]}")
            rows.append((label, self._text(mean), low, *(self._text(scores[key]) for key in clients)))
        unit = f"{primary.brackets()}{primary.direction}"
        title = f"{self.environment}: {primary.label} on what each client held out{unit}"
        return title, ("method", "mean", "worst" if clients else "worst client", *clients), rows

    def _text(self, value: float | None) -> str:
        return "–" if value is None else self.primary.text(value)

    def __repr__(self) -> str:
        return "\n".join(table.text() for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())

    def _tables(self) -> list[TextTable]:
        """The scores on the test set, and by client where there are some."""
        primary, others = self.primary, self.other_metrics
        of_methods = zip(*others.values(), strict=True) if others else [()] * len(self.methods)
        unit = primary.brackets()
        tested = TextTable(
            f"{self.environment}: {primary.label} on the test set after the last round{unit}{primary.direction}",
            ("method", "trials", "mean ± sd", *(head.removesuffix(unit) for head in others)),
            [
                (m.label, str(len(m.trials)), m.spread, *cells)
                for m, cells in zip(self.methods, of_methods, strict=True)
            ],
        )
        return [tested] if self.by_client is None else [tested, TextTable(*self.by_client)]

    def as_json(self) -> dict[str, Any]:
        """Plain values; fractions in percent."""
        return {
            "environment": self.environment,
            "trials": self.trials,
            "metric": self.primary.describe(),
            "methods": [
                {
                    **result.as_row(),
                    "reference": result.is_reference,
                    **_on_clients(result),
                    "rounds": list(map(finite, result.rounds)),
                    **({"times": result.times} if result.times else {}),
                }
                | {"warnings": result.warnings}
                for result in self.methods
            ],
        }


def _row(evaluation: Evaluation) -> dict[str, float | None]:
    """The primary metric, the loss, and the other metrics."""
    shown = evaluation.primary.shown(evaluation.score, evaluation.metrics)
    return {evaluation.primary.name: shown.pop(evaluation.primary.name), "loss": evaluation.loss} | shown


def _on_clients(result: MethodResult) -> dict[str, Any]:
    """What clients held out, where they did, under the final models and under these fine-tuned."""
    found = {"held_out": result.held_out, "fine_tuned": result.fine_tuned}
    return {name: _served(scores, result.primary) for name, scores in found.items() if scores}


def _served(scores: Mapping[str, float | None], primary: PrimaryMetric) -> dict[str, Any]:
    mean, worst = _mean_and_worst(scores, primary)
    summary = {"mean": mean, "worst": worst and worst[1], "worst_client": worst and worst[0]}
    return {**summary, "clients": dict(scores)}


def _mean_and_worst(
    scores: Mapping[str, float | None], primary: PrimaryMetric
) -> tuple[float | None, tuple[str, float] | None]:
    """Of the clients whose scores are known: the mean, and the worst one with its score."""
    known = {key: score for key, score in scores.items() if score is not None}
    if not known:
        return None, None
    worst = min(known, key=lambda key: primary.gain(known[key], over=0))
    return statistics.fmean(known.values()), (worst, known[worst])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None

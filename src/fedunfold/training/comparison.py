"""What a comparison of methods found."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from fedunfold.core.run_result import RunResult
from fedunfold.core.text_table import TextTable
from fedunfold.rules.learned import LearnedWeights


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
    def finals(self) -> list[float]:
        """Accuracy after the last round, in percent, of every trial."""
        return [100 * trial.scores[-1] for trial in self.trials]

    @property
    def mean(self) -> float:
        """Mean over the trials of the accuracy after the last round, in percent."""
        return statistics.fmean(self.finals)

    @property
    def sd(self) -> float:
        """Standard deviation over the trials (n − 1); 0 for a single one."""
        return statistics.stdev(self.finals) if len(self.trials) > 1 else 0.0

    @property
    def spread(self) -> str:
        """Mean and standard deviation for a table; the value alone where there is one."""
        return f"{self.mean:.1f} ± {self.sd:.1f}" if len(self.trials) > 1 else f"{self.mean:.1f}"

    def as_row(self) -> dict[str, Any]:
        """Plain values for a table."""
        return {"method": self.name, "accuracy_mean": self.mean, "accuracy_sd": self.sd}

    @property
    def warnings(self) -> list[str]:
        """What was odd about learning the weights, and about each trial."""
        learned = [] if self.learned is None else self.learned.warnings
        return [*learned, *(f"trial {i}: {line}" for i, trial in enumerate(self.trials) for line in trial.warnings)]

    @property
    def curves(self) -> list[list[float]]:
        """Accuracy after every round, as a fraction, of every trial; one that stopped early stays at its last."""
        rounds = max(len(trial.scores) for trial in self.trials)
        return [trial.scores + trial.scores[-1:] * (rounds - len(trial.scores)) for trial in self.trials]

    @property
    def rounds(self) -> list[float]:
        """Mean accuracy after every round, in percent."""
        return [100 * statistics.fmean(values) for values in zip(*self.curves, strict=True)]

    @property
    def worst_class(self) -> float:
        """Mean over the trials of the accuracy on the class that fares worst after the last round, in percent."""
        last = [trial.evaluations[-1].class_accuracy.nan_to_num(1).min() for trial in self.trials]
        return 100 * statistics.fmean(float(worst) for worst in last)

    def __repr__(self) -> str:
        return f"MethodResult(name={self.name!r}, trials={len(self.trials)}, mean={self.mean:.1f}, sd={self.sd:.1f})"


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
    dict_keys(['method', 'trial', 'round', 'accuracy', 'loss'])
    """

    environment: str
    trials: int
    methods: tuple[MethodResult, ...] = field(default=())

    def records(self) -> list[dict[str, Any]]:
        """A row for every method, trial and round (from 1), with the test's accuracy in percent and its loss.

        `pandas.DataFrame(table.records())` is the long form that most plotting and statistics start from.
        """
        return [
            {
                "method": result.name,
                "trial": trial,
                "round": t + 1,
                "accuracy": 100 * evaluation.score,
                "loss": evaluation.loss,
            }
            for result in self.methods
            for trial, run in enumerate(result.trials)
            for t, evaluation in enumerate(run.evaluations)
        ]

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> TextTable:
        return TextTable(
            f"{self.environment}: accuracy on the test set after the last round (%)",
            ("method", "trials", "mean ± sd", "worst class"),
            [(m.name, str(len(m.trials)), m.spread, f"{m.worst_class:.1f}") for m in self.methods],
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; accuracies in percent."""
        return {
            "environment": self.environment,
            "trials": self.trials,
            "methods": [
                {**result.as_row(), "rounds": result.rounds, "warnings": result.warnings} for result in self.methods
            ],
        }

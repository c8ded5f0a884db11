"""What the terminal shows: tables and notes on standard output, progress on standard error."""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedunfold.cli.wording import with_flags
from fedunfold.core.messages import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import Callback
from fedunfold.training.comparison import Comparison, MethodResult

# Names come from files and may have brackets in them: nothing is read as markup.
out = Console(markup=False)
err = Console(stderr=True, markup=False)


def print_json(document: object) -> None:
    """One JSON document on standard output; a number JSON has no word for is an error, not a NaN."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def say(text: str) -> None:
    """One line on standard output as it is: paths are neither wrapped nor read as markup."""
    out.print(text, soft_wrap=True, highlight=False)


def warn(text: str) -> None:
    """One line on standard error, beside the bars."""
    err.print(f"warning: {with_flags(text)}", soft_wrap=True, markup=False, highlight=False)


def note(lines: Iterable[str], about: str = "") -> None:
    """A line on standard output for everything that is odd about what is shown."""
    for line in lines:
        say(f"note: {f'{about}: ' if about else ''}{with_flags(line)}")


def progress() -> Progress:
    """Bars with the time left; nothing where standard error is not a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
        transient=True,
    )


class ProgressTracker(Callback, AbstractContextManager["ProgressTracker"]):
    """Shows where a run stands, and keeps what is done so far for an interruption."""

    def __init__(self) -> None:
        self._bars = progress()
        self._tasks: dict[str, TaskID] = {}
        self._rounds = 0
        self.rounds_made = 0  # of the last trial, those before an interruption included
        self.learned: dict[str, LearnedWeights] = {}
        self.runs: dict[str, list[RunResult]] = {}

    def __enter__(self) -> "ProgressTracker":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def on_start(self, settings: Mapping[str, Any]) -> None:
        self._rounds = settings["rounds"] * settings.get("trials", 1)

    def on_outer_step(self, method: str, so_far: LearnedWeights, iterations: int) -> None:
        self.learned[method] = so_far
        task = self._task(f"{method}: learning weights", iterations)
        self._bars.update(task, completed=len(so_far.losses), note=f"outer loss {so_far.losses[-1]:.5g}")

    def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
        task = self._task(f"{method}: rounds", self._rounds)
        self.rounds_made = round_index + 1
        self._bars.update(task, advance=1, note=f"{100 * evaluation.accuracy:.1f} %")

    def on_trial_end(self, method: str, trial: int, trials: int, result: RunResult) -> None:
        self.runs.setdefault(method, []).append(result)
        # Rounds before an interruption are not reported again.
        task = self._task(f"{method}: rounds", self._rounds)
        self._bars.update(task, completed=(trial + 1) * self._rounds // trials)

    def so_far(self, environment: str, at_least: int = 1) -> Comparison:
        """The methods with at least so many finished trials."""
        results = tuple(
            MethodResult(name, tuple(runs), self.learned.get(name))
            for name, runs in self.runs.items()
            if len(runs) >= at_least
        )
        return Comparison(environment, max((len(result.trials) for result in results), default=0), results)

    def _task(self, what: str, total: int) -> TaskID:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total, note="")
        return self._tasks[what]


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> Table:
    """A table whose columns hold numbers, but for those at `words`; an empty row ends a section."""
    made = Table(title=title or None)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i in words else "right")
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def comparison_table(comparison: Comparison) -> Table:
    """Accuracy after the last round, and what each method gains over the first."""
    first = comparison.methods[0]
    rows = (
        (
            result.name,
            str(len(result.trials)),
            result.spread,
            "" if result is first else f"{result.mean - first.mean:+.1f}",
            f"{result.worst_class:.1f}",
        )
        for result in comparison.methods
    )
    title = f"{comparison.environment}, accuracy on the test set after the last round"
    return table(title, ("method", "trials", "mean ± sd (%)", "gain", "worst class (%)"), rows)


def weights_table(learned: LearnedWeights, step_sizes: Sequence[float] = (), most: int = 12) -> Table:
    """Θ: a row for each round, a column for each client (the heaviest ones of a large federation).

    Where step sizes were learned too, they are in the last column.
    """
    shown = learned.weights.mean(0).argsort(descending=True)[:most].sort().values.tolist()
    hidden = len(learned.client_ids) - len(shown)
    title = "learned weights" + (f" ({hidden} lighter clients not shown)" if hidden else "")
    rows = (
        (str(t + 1), *(f"{number:.3f}" for number in (*row[shown].tolist(), *step_sizes[t : t + 1])))
        for t, row in enumerate(learned.weights)
    )
    heads = ("round", *(learned.client_ids[k] for k in shown), *(["step size"] if step_sizes else []))
    return table(title, heads, rows, words=())

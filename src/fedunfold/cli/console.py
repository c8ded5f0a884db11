"""What the terminal shows: tables and notes on standard output, progress on standard error."""

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedunfold.cli.wording import with_flags

if TYPE_CHECKING:
    from fedunfold.report.verdict import Verdict
    from fedunfold.rules.learned import LearnedWeights
    from fedunfold.training.comparison import Comparison

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


def say_verdict(verdict: "Verdict | None", warnings: Iterable[str]) -> None:
    """Which method to use, where there is one to choose, and what has to be known before it is used."""
    if verdict is not None:
        say(verdict.sentence)
    for line in warnings:
        say(f"warning: {line}")


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


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> Table:
    """A table whose columns hold numbers, but for those at `words`; an empty row ends a section."""
    made = Table(title=title or None)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i in words else "right", overflow="fold")  # no digit is cut off
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def comparison_table(comparison: "Comparison") -> Table:
    """The primary metric after the last round, what each method gains over the first, what it costs, and the other
    metrics."""
    first, primary, others = comparison.methods[0], comparison.primary, comparison.other_metrics
    trials = [len(result.trials) for result in comparison.methods]
    if len(set(trials)) > 1:  # some were stopped
        others = {"trials": list(map(str, trials)), **others}
    rows = (
        (
            result.name,
            result.spread,
            "" if result is first else _signed(primary.text(primary.gain(result.mean, over=first.mean))),
            *(cells[i] for cells in others.values()),
        )
        for i, result in enumerate(comparison.methods)
    )
    unit = primary.brackets()
    title = f"{comparison.environment}, {primary.label} on the test set after the last round{primary.direction}"
    if len(set(trials)) == 1:
        title += f"; {trials[0]} trial{'s' if trials[0] > 1 else ''}"
    heads = ("method", "mean ± sd", "gain", *(head.removesuffix(unit) for head in others))
    made = table(title + unit, heads, rows)
    made.box, made.padding, made.show_edge = SIMPLE_HEAD, (0, 1, 0, 0), False  # so that 80 columns hold many metrics
    made.columns[1].no_wrap = True
    learned = [f"{m.learning_rounds} rounds to learn {m.name}" for m in comparison.methods if m.learning_rounds]
    references = ", ".join(result.name for result in comparison.methods if result.is_reference)
    notes = [*learned, *([f"for reference, no federated methods: {references}"] if references else [])]
    made.caption = "\n".join(notes) or None
    return made


def _signed(number: str) -> str:
    return number if number.startswith("-") else f"+{number}"


def weights_table(learned: "LearnedWeights", step_sizes: Sequence[float] = (), most: int = 12) -> Table:
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

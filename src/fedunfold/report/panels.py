"""Cards: a chart with its title, and a choice where there are several of the same kind."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.report import charts
from fedunfold.report.animation import Frames, of_learning, of_use
from fedunfold.report.grouping import BASELINE, Group
from fedunfold.report.tables import Table, numbers_table
from fedunfold.report.text import capital, shortened
from fedunfold.runs.schema import Floats, RunRecord


@dataclass(frozen=True, eq=False)
class Drawing:
    """One of a card's charts.

    Attributes:
        label: Its name in the choice.
        chart: What is drawn.
        frames: What a slider shows in it.
    """

    label: str
    chart: charts.Chart
    frames: Frames | None = None

    def as_json(self) -> dict[str, Any]:
        """As the page reads it."""
        return {**self.chart, "frames": None if self.frames is None else self.frames.as_json()}


@dataclass(frozen=True, eq=False)
class Card:
    """A place on the page.

    Attributes:
        of: Whose it is, where there are several.
        about: What its charts show, in words.
        drawings: Its charts, of which one is chosen.
        numbers: What they show, as a table.
    """

    of: str
    about: str
    drawings: tuple[Drawing, ...]
    numbers: Table | None = None

    @property
    def slides(self) -> bool:
        """Whether it has a slider."""
        return any(drawing.frames is not None and len(drawing.frames.captions) > 1 for drawing in self.drawings)


def cards_of(names: Sequence[str], groups: Sequence[Group]) -> dict[str, list[Card]]:
    """The cards of every section that has some; `names` are the groups'.

    Args:
        names: The groups' names, empty for one alone.
        groups: The groups.

    Returns:
        Cards by section; none for one without.
    """
    named = list(zip(names, groups, strict=True))
    runs = [run for group in groups for run in group.runs]
    several = len(runs) > 1
    sections: dict[str, Iterable[Card | None]] = {
        "labels": (_labels(group, name) for name, group in named),
        "scores": (_scores(group, name) for name, group in named),
        "weights": (card for group in groups for card in _weights(group, several)),
        "loss": (_outer_loss(run, run.label if several else "") for run in runs),
        "classes": (_pairs(group, name, "class") for name, group in named),
        "clients": (
            *(_pairs(group, name, "client", held_out=held) for name, group in named for held in (False, True)),
            *(_left_out(run, run.label if several else "") for run in runs),
        ),
    }
    return {section: [card for card in cards if card is not None] for section, cards in sections.items()}


def _labels(group: Group, of: str) -> Card | None:
    if group.first.federation.classes < 2:
        return None
    chart = charts.labels_held(group.first.federation, group.first.clients, shortened(group.first.classes))
    return Card(of, "Samples of each class at each client; empty where it has none.", (Drawing("", chart),))


def _scores(group: Group, of: str) -> Card | None:
    if not group.methods:
        return None
    trials = sorted({len(method.scores) for method in group.methods})
    counted = " to ".join(str(count) for count in dict.fromkeys((trials[0], trials[-1])))
    primary = group.first.primary
    about = f"{capital(primary.label)} on the test set after every round{primary.direction}."
    if trials[-1] > 1:
        about += f" Lines are means of {counted} trials; the shade is one standard deviation to either side."
    rounds = max(method.scores.shape[1] for method in group.methods)
    if rounds > 1:
        about += " A double click shows all of the first rounds too."
    columns = {method.label: method.scores.mean(0) for method in group.methods}
    numbers = numbers_table("round", [str(t + 1) for t in range(rounds)], columns, primary.text)
    return Card(of, about, (Drawing("", charts.scores(group)),), numbers)


def _weights(group: Group, several: bool) -> Iterator[Card]:
    """A card for each run: learned weights with their history first, then those that other methods used.

    One scale for the group: a colour means the same in all of them.
    """
    found = {run.label: _frames(run) for run in group.runs}
    every = [frames for shown in found.values() for frames in shown.values()]
    if not every:
        return
    most, usual = max(frames.most for frames in every), max(frames.usual for frames in every)
    limit = usual if 0 < usual < most / 2 else most
    for run in group.runs:
        shown = found[run.label]
        drawings = tuple(
            Drawing(name, charts.weights(run.clients, frames.values.shape[1], limit), frames)
            for name, frames in shown.items()
        )
        about = "How much each client counts in each round."
        if run.learned:
            about += " Move the slider to watch the weights being learned."
        if limit < most:
            about += f" The strongest colour stands for {limit:.2g} and more, up to {most:.2g}."
        means = {name: frames.values[-1].mean(0) for name, frames in shown.items()}
        numbers = numbers_table("mean over the rounds", run.clients, means, "{:.4f}".format)
        yield Card(run.label if several else "", about, drawings, numbers)


def _frames(run: RunRecord) -> dict[str, Frames]:
    shown = {name: of_learning(learned) for name, learned in run.learned.items()}
    used = [method for method in run.methods if method.name not in shown and not method.is_reference]
    return shown | {method.name: of_use(method.weights) for method in used}


def _outer_loss(run: RunRecord, of: str) -> Card | None:
    if not run.learned:
        return None
    return Card(of, "The outer loss at every iteration.", (Drawing("", charts.outer_loss(run)),))


def _pairs(group: Group, of: str, what: Literal["class", "client"], *, held_out: bool = False) -> Card | None:
    """Every method beside the baseline, by class or by client; alone where there is none."""
    if what == "class":
        names, on_axis = group.first.classes, shortened(group.first.classes)
        about = "Test accuracy of the final models in each class, mean of the trials."
        values = {m.label: m.class_accuracy.mean(0) for m in group.methods if m.class_accuracy.size}
        metric = ACCURACY
    else:
        names, metric = group.first.clients, group.first.primary
        on_axis = names
        rows = "rows that it held out" if held_out else "own training data"
        about = f"{capital(metric.label)} of the final models on each client's {rows}, mean of the trials."
        scores = {m.label: m.held_out if held_out else m.client_scores for m in group.methods}
        if held_out:
            scores |= {f"{m.label}, fine-tuned": m.fine_tuned for m in group.methods}
        values = {label: found.mean(0) for label, found in scores.items() if found is not None}
    base = group.baseline.label if group.baseline is not None else ""
    ordered = [method.label for method in (group.baseline, *group.others) if method]
    shown = {label: values[label] for own in ordered for label in (own, f"{own}, fine-tuned") if label in values}
    return _compared(of, about, names, on_axis, shown, base, what, metric)


def _left_out(run: RunRecord, of: str) -> Card | None:
    """What every method reaches on each client without it, beside FedAvg or else the first."""
    about = f"{capital(run.primary.label)} on each client of models that were trained without it, mean of the trials."
    base = "" if len(run.left_out) < 2 else BASELINE if BASELINE in run.left_out else next(iter(run.left_out))
    return _compared(of, about, run.clients, run.clients, run.left_out, base, "client", run.primary)


def _compared(
    of: str,
    about: str,
    names: Sequence[str],
    on_axis: Sequence[str],
    values: Mapping[str, Floats],
    base: str,
    what: Literal["class", "client"],
    metric: PrimaryMetric,
) -> Card | None:
    """A drawing of every method beside the base, where there is one; nothing where there is no method."""
    drawings = tuple(
        Drawing(
            label,
            charts.before_and_after(on_axis, values.get(base), own, (base, label), x=what, metric=metric),
        )
        for label, own in values.items()
        if label != base
    )
    if not drawings:
        return None
    if base in values:
        up, down = ("gain", "loss") if metric.greater_is_better else ("loss", "gain")
        about += f" Rings are {base}; a line up is a {up}, a line down a {down}."
    if len(names) > charts.MARKED:
        about += " They stand in the order of the rings." if base in values else " They stand in order."
    return Card(of, about, drawings, numbers_table(what, names, values, metric.text))

"""The study of attacks: its table, its figure, and what was seen, all from the records."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.plotting import COLOURS, MARKERS
from fedunfold.studies.cases import StudyCase
from fedunfold.studies.records import CaseRecords
from fedunfold.studies.rows import StudyRow
from fedunfold.studies.tables import markdown, spread, template

KINDS = {"flip": "clients with flipped labels", "noise": "clients that send noise"}
LEARNED = ("duw-fedavg", "duw-fedavg-screened")


def section(studied: Sequence[CaseRecords], figure: str) -> str:
    """Everything that results.md says about the study.

    Args:
        studied: Its cases.
        figure: The file of its figure.
    """
    parts = [
        template("bad-clients"),
        f"![Accuracy against bad clients, and the weight learned for them]({figure})\n",
        _table(studied),
    ]
    seen = [*map(_describe_weights, studied), *map(_describe_order, studied)]
    lines = [line for line in (*seen, *(line for one in studied for line in _describe_rejected(one))) if line]
    if lines:
        parts.append("### Seen\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    return "\n".join(parts)


def figure(studied: Sequence[CaseRecords]) -> Figure:
    """Accuracy against the number of bad clients for each kind of attack, and the weight learned for two of them."""
    drawn = Figure(figsize=(13, 7.6), layout="constrained")
    rows = drawn.subplots(2, 2, squeeze=False)
    for (accuracy, weights), (kind, title) in zip(rows, KINDS.items(), strict=True):
        own = [one for one in studied if one.case.attack is None or one.case.attack.kind == kind]
        _draw_accuracies(accuracy, own)
        _draw_weights(weights, own)
        accuracy.set_title(f"{title}: test accuracy (%)", loc="left", fontsize=10)
        weights.set_title(f"{title}: weight of the bad ones (%)", loc="left", fontsize=10)
    for axes in rows.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
    return drawn


def _bad_clients(case: StudyCase) -> list[int]:
    keys = case.load().keys
    return [] if case.attack is None else [keys.index(key) for key in case.attack.clients(keys)]


def _size_of_bad(case: StudyCase) -> float:
    """The bad clients' weight by size, in percent."""
    sizes = np.array(case.load().sizes, dtype=float)
    return float(100 * sizes[_bad_clients(case)].sum() / sizes.sum())


def _weight_of_bad(seen: CaseRecords, name: str) -> np.ndarray | None:
    """The bad clients' learned weight in every round, in percent."""
    weights = seen.weights(name)
    return None if weights is None else np.asarray(100 * weights[:, _bad_clients(seen.case)].sum(1))


def _title(case: StudyCase) -> str:
    return "nobody bad" if case.attack is None else f"{case.attack.bad} {case.attack.kind}"


def _table(studied: Sequence[CaseRecords]) -> str:
    def cells(row: StudyRow) -> list[str]:
        found = [one.finals(row.name) for one in studied]
        return [row.title, *(spread(values) if values else "" for values in found)]

    return markdown(["accuracy (%)", *(_title(one.case) for one in studied)], map(cells, studied[0].rows))


def _describe_weights(seen: CaseRecords) -> str:
    found = _weight_of_bad(seen, "duw-fedavg")
    if found is None or not _bad_clients(seen.case):
        return ""
    return (
        f"{_title(seen.case)}: learned weights give the bad clients {found.mean():.1f} % over the rounds "
        f"({found.min():.1f} to {found.max():.1f} %, {found[-1]:.1f} % in the last), their size would give "
        f"them {_size_of_bad(seen.case):.1f} %."
    )


def _describe_order(seen: CaseRecords) -> str:
    means = {row.title: float(np.mean(values)) for row in seen.rows if (values := seen.finals(row.name))}
    if "FedAvg" not in means or "learned" not in means:
        return ""
    order = sorted(means, key=lambda title: -means[title])
    return (
        f"{_title(seen.case)}: {order[0]} ends highest ({means[order[0]]:.1f} %), {order[-1]} lowest "
        f"({means[order[-1]]:.1f} %); learned weights lie {means['learned'] - means['FedAvg']:+.1f} from FedAvg."
    )


def _describe_rejected(seen: CaseRecords) -> Iterator[str]:
    """Over all trials: in how many of their rounds updates of bad and of good clients were rejected."""
    keys, bad = seen.case.load().keys, _bad_clients(seen.case)
    for row in seen.rows:
        trials = seen.trials(row.name)
        if row.filter == "norm" and row.learning is None and trials:
            of_bad = sum(trial["rejected"].get(keys[k], 0) for trial in trials for k in bad)
            of_all = sum(sum(trial["rejected"].values()) for trial in trials)
            rounds = len(bad) * sum(trial["rounds"] for trial in trials)
            those = f"bad clients in {of_bad} of {rounds} of their rounds, " if bad else ""
            yield f"{_title(seen.case)}: the screening rejected {those}good ones in {of_all - of_bad}."


def _draw_accuracies(axes: Axes, studied: Sequence[CaseRecords]) -> None:
    rows = studied[0].rows
    for i, row in enumerate(rows):
        points = [(len(_bad_clients(one.case)), values) for one in studied if (values := one.finals(row.name))]
        if not points:
            continue
        # Beside each other, so that bars of one number of bad clients do not hide each other.
        at = np.array([bad for bad, _ in points]) + 0.03 * (i - len(rows) / 2)
        mean = [float(np.mean(values)) for _, values in points]
        sd = [float(np.std(values, ddof=1)) if len(values) > 1 else 0.0 for _, values in points]
        axes.errorbar(at, mean, sd, color=COLOURS[i], marker=MARKERS[i], ms=5, lw=1.4, capsize=2, label=row.title)
    axes.set_xlabel("bad clients of 10")
    axes.set_xticks([0, 1, 2])
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_weights(axes: Axes, studied: Sequence[CaseRecords]) -> None:
    for i, one in enumerate(one for one in studied if _bad_clients(one.case)):
        title = _title(one.case)
        for name, style in zip(LEARNED, ("-", "--"), strict=True):
            found = _weight_of_bad(one, name)
            if found is not None:
                label = f"{title}, learned{'' if style == '-' else ', screened'}"
                rounds = np.arange(1, len(found) + 1)
                axes.plot(rounds, found, style, color=COLOURS[i], marker=MARKERS[i], ms=4, label=label)
        axes.axhline(_size_of_bad(one.case), color=COLOURS[i], ls=":", lw=1.2, label=f"{title}, by size")
    axes.set_xlabel("round")
    axes.set_ylim(0, 1.5 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")

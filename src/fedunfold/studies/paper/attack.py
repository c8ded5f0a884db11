"""The study of attacks: its table, its figure, and what was seen, all from the records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedunfold.plotting import COLOURS, MARKERS
from fedunfold.studies.paper.tables import finals, row, spread
from fedunfold.studies.reproduction import Records, StudyCase, StudyRow

KINDS = {"flip": "clients with flipped labels", "noise": "clients that send noise"}
LEARNED = ("duw-fedavg", "duw-fedavg-screened")

HEAD = (
    "## Bad clients\n\n"
    "Ten sites share the digits, and 0, 1 or 2 of them are bad. Flipping clients train on labels that are mixed up, "
    "all in the same way (y becomes 9 − y), and follow the rules otherwise; noisy ones send a random direction, 10 "
    "times as long as their update. All methods but the learned ones weigh by size. Those set aside by the screening "
    "are dropped in that round, whatever weight they have. Weights are learned on the clients' own losses: the bad "
    "clients' wrong labels are among what they are learned for, and nobody tells the learning who is bad.\n"
)


@dataclass(frozen=True)
class Seen:
    """One case: the accuracy of every entry, in percent, and the weight of its bad clients, in percent."""

    case: StudyCase
    entries: Sequence[StudyRow]
    records: Records

    def finals(self, entry: StudyRow) -> list[float]:
        return finals(self.records.trials(self.case, entry.name, entry.trials))

    @property
    def bad(self) -> list[int]:
        keys = self.case.load().keys
        clients = () if self.case.attack is None else self.case.attack.clients(keys)
        return [keys.index(key) for key in clients]

    def by_size(self) -> float:
        sizes = np.array(self.case.load().sizes, dtype=float)
        return float(100 * sizes[self.bad].sum() / sizes.sum())

    def learned(self, name: str) -> np.ndarray | None:
        """The bad clients' weight in every round, in percent."""
        found = self.records.weights(self.case, name)
        return None if found is None else np.asarray(100 * found.weights[:, self.bad].sum(1).numpy())

    def rejected(self, entry: StudyRow) -> tuple[int, int, int]:
        """Over all trials: rounds in which bad clients were set aside, of how many, and those of good ones."""
        trials = self.records.trials(self.case, entry.name, entry.trials)
        keys = self.case.load().keys
        of_bad = sum(trial["rejected"].get(keys[k], 0) for trial in trials for k in self.bad)
        every = sum(sum(trial["rejected"].values()) for trial in trials)
        return of_bad, len(self.bad) * sum(trial["rounds"] for trial in trials), every - of_bad


def section(studied: Sequence[tuple[StudyCase, Sequence[StudyRow]]], records: Records, figure: str) -> str:
    """Everything that results.md says about the study."""
    seen = [Seen(case, entries, records) for case, entries in studied]
    parts = [HEAD, f"![Accuracy against bad clients, and the weight learned for them]({figure})\n", _table(seen)]
    lines = [*_weights(seen), *_best(seen), *_screened(seen)]
    if lines:
        parts.append("### Seen\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    return "\n".join(parts)


def _table(seen: Sequence[Seen]) -> str:
    heads = ["accuracy (%)", *(_title(one.case) for one in seen)]
    lines = [row(heads), row(["---"] * len(heads))]
    for entry in seen[0].entries:
        found = [one.finals(entry) for one in seen]
        lines.append(row([entry.title, *(spread(values) if values else "" for values in found)]))
    return "\n".join(lines) + "\n"


def _title(case: StudyCase) -> str:
    return "nobody bad" if case.attack is None else f"{case.attack.bad} {case.attack.kind}"


def _weights(seen: Sequence[Seen]) -> list[str]:
    lines = []
    for one in seen:
        found = one.learned("duw-fedavg")
        if found is not None and one.bad:
            lines.append(
                f"{_title(one.case)}: learned weights give the bad clients {found.mean():.1f} % over the rounds "
                f"({found.min():.1f} to {found.max():.1f} %, {found[-1]:.1f} % in the last), their size would give "
                f"them {one.by_size():.1f} %."
            )
    return lines


def _best(seen: Sequence[Seen]) -> list[str]:
    lines = []
    for one in seen:
        means = {entry.title: float(np.mean(values)) for entry in one.entries if (values := one.finals(entry))}
        if "FedAvg" not in means or "learned" not in means:
            continue
        order = sorted(means, key=lambda title: -means[title])
        lines.append(
            f"{_title(one.case)}: {order[0]} ends highest ({means[order[0]]:.1f} %), {order[-1]} lowest "
            f"({means[order[-1]]:.1f} %); learned weights lie {means['learned'] - means['FedAvg']:+.1f} from FedAvg."
        )
    return lines


def _screened(seen: Sequence[Seen]) -> list[str]:
    lines = []
    for one in seen:
        for entry in one.entries:
            if entry.screen == "norm" and entry.learning is None and one.finals(entry):
                of_bad, of, good = one.rejected(entry)
                bad = f"bad clients in {of_bad} of {of} of their rounds, " if one.bad else ""
                lines.append(f"{_title(one.case)}: the screening set aside {bad}good ones in {good}.")
    return lines


def figure(studied: Sequence[tuple[StudyCase, Sequence[StudyRow]]], records: Records) -> Figure:
    """Accuracy against the number of bad clients for each kind of attack, and the weight learned for two of them."""
    seen = [Seen(case, entries, records) for case, entries in studied]
    drawn = Figure(figsize=(13, 7.6), layout="constrained")
    rows = drawn.subplots(2, 2, squeeze=False)
    for (accuracy, weights), (kind, title) in zip(rows, KINDS.items(), strict=True):
        own = [one for one in seen if one.case.attack is None or one.case.attack.kind == kind]
        _accuracies(accuracy, own)
        _learned_weights(weights, own)
        accuracy.set_title(f"{title}: test accuracy (%)", loc="left", fontsize=10)
        weights.set_title(f"{title}: weight of the bad ones (%)", loc="left", fontsize=10)
    for axes in rows.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
    return drawn


def _accuracies(axes: Axes, seen: Sequence[Seen]) -> None:
    for i, entry in enumerate(seen[0].entries):
        points = [(len(one.bad), one.finals(entry)) for one in seen if one.finals(entry)]
        if not points:
            continue
        # Side by side, so that bars of one number of bad clients do not hide each other.
        at = np.array([bad for bad, _ in points]) + 0.03 * (i - len(seen[0].entries) / 2)
        mean = [float(np.mean(values)) for _, values in points]
        sd = [float(np.std(values, ddof=1)) if len(values) > 1 else 0.0 for _, values in points]
        axes.errorbar(at, mean, sd, color=COLOURS[i], marker=MARKERS[i], ms=5, lw=1.4, capsize=2, label=entry.title)
    axes.set_xlabel("bad clients of 10")
    axes.set_xticks([0, 1, 2])
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _learned_weights(axes: Axes, seen: Sequence[Seen]) -> None:
    colour = 0
    for one in seen:
        if not one.bad:
            continue
        for name, style in zip(LEARNED, ("-", "--"), strict=True):
            found = one.learned(name)
            if found is not None:
                label = f"{_title(one.case)}, learned{'' if style == '-' else ', screened'}"
                rounds = np.arange(1, len(found) + 1)
                axes.plot(rounds, found, style, color=COLOURS[colour], marker=MARKERS[colour], ms=4, label=label)
        axes.axhline(one.by_size(), color=COLOURS[colour], ls=":", lw=1.2, label=f"{_title(one.case)}, by size")
        colour += 1
    axes.set_xlabel("round")
    axes.set_ylim(0, 1.5 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")

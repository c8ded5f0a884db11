"""What is run: the federations, methods and trials of each section, and which settings the rivals get."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.rule.entrants import FEATURES, FORMULA, PARTS, PRIVATE, RULE, Entrant
from benchmarks.rule.federations import BAD_DATA, BAD_KINDS, DIRICHLET
from benchmarks.rule.records import Record
from benchmarks.rule.runs import Job
from fedunfold.core.errors import InputError

STEPS = (0.5, 1.0, 1.5, 2.0, 3.0)
GRID: Mapping[str, tuple[str, ...]] = {
    "fedavg": tuple(f"sgd:lr={lr:g}" for lr in STEPS),
    "fedavgm": tuple(f"momentum:beta={beta:g},lr={lr:g}" for beta in (0.5, 0.7, 0.9) for lr in (0.3, 0.6, 1)),
    "fedadam": tuple(f"adam:lr={lr:g},tau={tau:g}" for lr in (0.001, 0.003, 0.01, 0.03, 0.1) for tau in (1e-3, 1e-2)),
    "fednova": tuple(f"sgd:lr={lr:g}" for lr in STEPS),
    "fedexp": tuple(f"exp:epsilon={epsilon:g}" for epsilon in (1e-4, 1e-3, 1e-2, 0.1, 1)),
}
"""The server steps that each rival's is chosen among."""
KEPT = "fedavg (keep)"
"""FedAvg as the paper has it: an absent client counts as one that changed nothing."""
COMPLETE = f"{RULE} without {' '.join(PARTS)}"


@dataclass(frozen=True)
class Section:
    """A part of the evaluation.

    Attributes:
        name: What it is called.
        environments: Its federations.
        trials: How many runs of each, by federation; `""` for all others.
        last: Over how many last rounds a run's score is the mean.
        numbered: Whether federations are drawn by number, so that there may be fewer of them.
        rivals_once: Whether rivals other than FedAvg are run in the first trial alone: they are most of the work.
    """

    name: str
    environments: tuple[str, ...]
    trials: Mapping[str, int]
    last: int = 1
    numbered: bool = False
    rivals_once: bool = False

    def smaller(self, trials: int | None, federations: int | None) -> "Section":
        """The same with other numbers, where they are given."""
        kept = self.environments[:federations] if self.numbered else self.environments
        single = self.numbered and self.trials == {"": 1}  # here a federation is the trial
        return replace(self, environments=kept, trials={"": trials} if trials and not single else self.trials)

    def entrants(self, rule: str, chosen: Mapping[str, str]) -> list[Entrant]:
        """Its methods."""
        ours, fedavg = Entrant(RULE, RULE, rule=rule), Entrant("fedavg", "fedavg")
        if self.name == "tuning":
            settings = [Entrant(f"{base} {server}", base, server) for base in GRID for server in GRID[base]]
            return [fedavg, *settings]
        if self.name == "ablation":
            lacking = (*FEATURES, *PARTS, " ".join(PARTS))
            others = [Entrant(name, name) for name in (FORMULA, PRIVATE)]
            blind = [replace(ours, label=f"{RULE} without {one}", without=one) for one in lacking]
            return [fedavg, ours, *others, *blind]
        if self.name == "bad-clients":
            return [fedavg, ours]
        tuned = [Entrant(f"{base} (tuned)", base, server) for base, server in chosen.items()]
        kept = [replace(fedavg, label=KEPT, absent="keep")] if self.name == "paper" else []
        return [*kept, fedavg, *tuned, ours]

    def jobs(self, rule: str, chosen: Mapping[str, str]) -> Iterator[Job]:
        """Its runs, those in one federation one after the other."""
        entrants = self.entrants(rule, chosen)
        for environment in self.environments:
            for trial in range(self.trials.get(environment, self.trials[""])):
                for entrant in entrants:
                    if trial and entrant.server and self.rivals_once:
                        continue
                    yield Job(self.name, environment, entrant, trial)


def _numbered(purpose: str, count: int) -> tuple[str, ...]:
    return tuple(f"{purpose}-{number}" for number in range(count))


PAPER = ("mnist-1", "mnist-2", "mnist-3", "mnist-4", "dogs-a", "dogs-b", "digits-label-skew")
NATURAL = {"wisdm": 10, "wisdm-sampled": 10, "shakespeare": 3, "tcga-brca": 5}
BAD = tuple(f"{data}-{kind}-{bad}" for data in BAD_DATA for kind in BAD_KINDS for bad in (1, 2))
SECTIONS = {
    section.name: section
    for section in (
        Section("tuning", _numbered("tuning", 96), {"": 1}, last=3, numbered=True),
        Section("paper", PAPER, {"": 10}),
        Section("dirichlet", tuple(DIRICHLET), {"": 20}, last=5),
        Section("natural", tuple(NATURAL), {"": 1, **NATURAL}),
        Section("held-out", _numbered("held-out", 300), {"": 3}, last=3, numbered=True, rivals_once=True),
        Section("bad-clients", BAD, {"": 10}, last=3),
        Section("ablation", _numbered("ablation", 96), {"": 1}, last=3, numbered=True),
    )
}
"""In the order they are run in: the settings chosen in the first are used in the others."""
USE_CHOICE = ("paper", "dirichlet", "natural", "held-out")


def mean_gains(records: Iterable[Record], last: int) -> dict[str, float]:
    """Of every method the mean gain over FedAvg, over the federations in which all methods were run.

    Where FedAvg itself diverges nothing is to be compared.
    """
    scores: dict[str, dict[str, float]] = {}
    methods = set()
    for record in records:
        scores.setdefault(record.environment, {})[record.method] = record.score(last)
        methods.add(record.method)
        if record.method == "fedavg" and record.final is None:
            scores[record.environment].pop("fedavg")
    whole = [own for own in scores.values() if own.keys() == methods]
    return {name: fmean(own[name] - own["fedavg"] for own in whole) for name in sorted(methods)} if whole else {}


def choice(records: Iterable[Record]) -> dict[str, str]:
    """The server step with the largest mean gain of each rival.

    Raises:
        InputError: There are no records to choose by.
    """
    gains = mean_gains(records, SECTIONS["tuning"].last)
    if not gains:
        raise InputError("the rivals' settings are not chosen yet; run the section tuning first.")
    return {base: max(servers, key=lambda server: gains[f"{base} {server}"]) for base, servers in GRID.items()}

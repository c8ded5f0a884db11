"""What the paper says it saw, held against the records: one line for every claim.

Claims count rounds from 1, as the figures do; the arrays from 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fedunfold.studies.paper.tables import finals, rate_fit, rate_points, slopes
from fedunfold.studies.reproduction import RATE_ROUNDS, Records, StudyCase, StudyRow

OTHERS_IN_DOGS = ("fedavg", "dr-fedavg", "fedadp", "fedfa")


@dataclass(frozen=True)
class Finding:
    """A claim about a case, what was seen, and whether it holds."""

    case: str
    claim: str
    seen: str
    holds: bool


@dataclass(frozen=True)
class _Seen:
    """The records of a case, as the claims ask for them."""

    case: StudyCase
    records: Records
    trials: int

    def finals(self, name: str) -> np.ndarray:
        return np.array(finals(self.records.trials(self.case, name, self.trials)))

    def curve(self, name: str) -> np.ndarray:
        """Mean accuracy after every round, in percent."""
        trials = self.records.trials(self.case, name, self.trials)
        return np.asarray(100 * np.mean([trial["accuracies"] for trial in trials], axis=0))

    def weights(self) -> np.ndarray:
        learned = self.records.weights(self.case, "duw-fedavg")
        if learned is None:
            raise LookupError(f"{self.case.name} has no learned weights")
        return np.asarray(learned.weights.numpy())

    def finding(self, claim: str, seen: str, holds: bool) -> Finding:
        return Finding(self.case.name, claim, seen, bool(holds))


def findings(case: StudyCase, entries: list[StudyRow], records: Records) -> list[Finding]:
    """All claims about a case, where everything they are about has been run."""
    if case.name not in CLAIMS:
        return []
    claims, needed = CLAIMS[case.name]
    found = {entry.name: entry for entry in entries}
    for name in needed:
        entry = found.get(name)
        if entry is None or len(records.trials(case, name, entry.trials)) < entry.trials:
            return []
        if entry.learning is not None and not records.has_weights(case, name):
            return []
    return list(claims(_Seen(case, records, max(found[name].trials for name in needed))))


def _quantity_skew(seen: _Seen) -> Iterator[Finding]:
    duw = seen.finals("duw-fedavg").mean()
    best = max(seen.finals(name).mean() for name in ("fedavg", "dr-fedavg"))
    yield seen.finding("DUW about equal: at most 2 points below FedAvg and DR", f"{duw - best:+.1f}", duw >= best - 2)
    weights = seen.weights()
    least = weights[1:8, 4].min()
    yield seen.finding("client 4 dominates: Θ > 0.9 in rounds 2 to 8", f"at least {least:.3f}", least > 0.9)
    low, high = weights[-1].min(), weights[-1].max()
    even = low >= 0.05 and high <= 0.5
    yield seen.finding("nearly equal in the last round: Θ in [0.05, 0.5]", f"{low:.2f} to {high:.2f}", even)


def _label_skew(seen: _Seen) -> Iterator[Finding]:
    duw = seen.finals("duw-fedavg").mean()
    best = max(seen.finals(name).mean() for name in ("fedavg", "dr-fedavg"))
    yield seen.finding("DUW reaches 73 %", f"{duw:.1f} %", duw >= 73)
    yield seen.finding("DUW at least 16 points above FedAvg and DR", f"{duw - best:+.1f}", duw >= best + 16)
    pair = seen.weights()[:, :2].sum(1)
    grown = pair[-1] > max(0.5, pair[0])
    yield seen.finding("clients 0 and 1 grow, above half at the end", f"{pair[0]:.2f} to {pair[-1]:.2f}", grown)


def _always_above(seen: _Seen) -> Iterator[Finding]:
    duw = seen.curve("duw-fedavg")
    ahead = np.min([duw - seen.curve(name) for name in ("fedavg", "dr-fedavg")], axis=0)
    least = ahead[2:].min()
    claim = "DUW above FedAvg and DR in every round from the third on"
    yield seen.finding(claim, f"by at least {least:.1f}", least > 0)
    yield seen.finding("DUW at least 1 point above both at the end", f"{ahead[-1]:+.1f}", ahead[-1] >= 1)


def _computation_skew(seen: _Seen) -> Iterator[Finding]:
    yield from _always_above(seen)
    least = seen.weights()[1:8, 0].min()
    yield seen.finding("client 0 dominates: Θ > 0.9 in rounds 2 to 8", f"at least {least:.3f}", least > 0.9)


def _communication_skew(seen: _Seen) -> Iterator[Finding]:
    yield from _always_above(seen)
    participation_probability = [client.participation_probability for client in seen.case.env.clients]
    correlation = _rank_correlation(np.array(participation_probability), seen.weights()[:5].mean(0))
    claim = "weights ordered by reliability: Spearman's ρ ≥ 0.9 over the first five rounds"
    yield seen.finding(claim, f"{correlation:.2f}", correlation >= 0.9)


def _rate(seen: _Seen) -> Iterator[Finding]:
    rounds, variances = rate_points(seen.case, seen.records)
    over = max(v * t**0.5 for t, v in zip(rounds, variances, strict=True))
    yield seen.finding("variance below 1/√T for every T", f"at most {over:.2f} of it", over < 1)
    slope, _ = rate_fit(rounds, variances)
    yield seen.finding("variance falls as fast as 1/√T: slope ≤ −0.5", slopes(rounds, variances), slope <= -0.5)


def _dogs(seen: _Seen) -> Iterator[Finding]:
    duw = seen.finals("duw-fedavg").mean()
    margins = {name: duw - seen.finals(name).mean() for name in OTHERS_IN_DOGS}
    nearest = min(margins, key=lambda name: margins[name])
    claim = "DUW-FedAvg above FedAvg, DR, FedAdp and FedFa"
    yield seen.finding(claim, f"{margins[nearest]:+.1f} against {nearest}", margins[nearest] > 0)


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's ρ = 1 − 6 Σ d² / (n (n² − 1)) for values without ties, d being the differences of ranks."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    squares = int(np.square(first - second).sum())
    return 1 - 6 * squares / (len(a) * (len(a) ** 2 - 1))


COMPARED = ("fedavg", "dr-fedavg", "duw-fedavg")
CLAIMS: Mapping[str, tuple[Callable[[_Seen], Iterator[Finding]], tuple[str, ...]]] = {
    "mnist-1": (_quantity_skew, COMPARED),
    "mnist-2": (_label_skew, COMPARED),
    "mnist-3": (_computation_skew, COMPARED),
    "mnist-4": (_communication_skew, COMPARED),
    "mnist-rate": (_rate, tuple(f"rounds-{t}" for t in RATE_ROUNDS)),
    "dogs-a": (_dogs, (*OTHERS_IN_DOGS, "duw-fedavg")),
    "dogs-b": (_dogs, (*OTHERS_IN_DOGS, "duw-fedavg")),
}
"""By case: its claims, and the entries they are about."""

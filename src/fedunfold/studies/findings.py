"""What the paper reports, held against the records: one line for every claim.

Claims count rounds from 1, as the figures do; the arrays from 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from fedunfold.studies.records import CaseRecords, curves
from fedunfold.studies.rows import RATE_ROUNDS
from fedunfold.studies.tables import rate_fit, rate_points, slopes

OTHERS_IN_DOGS = ("fedavg", "dr-fedavg", "fedadp", "fedfa")
Claim = tuple[str, str, bool | np.bool_]
"""What is claimed, what was seen, and whether it holds."""


@dataclass(frozen=True)
class Finding:
    """A claim about a case.

    Attributes:
        case: The case's name.
        claim: What is claimed.
        seen: What was seen.
        holds: Whether it holds.
    """

    case: str
    claim: str
    seen: str
    holds: bool


def findings(seen: CaseRecords) -> list[Finding]:
    """All claims about a case, where everything they are about has been run."""
    case, records = seen.case, seen.records
    if case.name not in CLAIMS:
        return []
    claims, needed = CLAIMS[case.name]
    found = {row.name: row for row in seen.rows}
    for name in needed:
        row = found.get(name)
        if row is None or len(seen.trials(name)) < row.trials:
            return []
        if row.learning is not None and not records.has_weights(case, name):
            return []
    return [Finding(case.name, claim, text, bool(holds)) for claim, text, holds in claims(seen)]


def _final(seen: CaseRecords, name: str) -> float:
    return float(np.mean(seen.finals(name)))


def _curve(seen: CaseRecords, name: str) -> np.ndarray:
    """Mean accuracy after every round."""
    return np.asarray(curves(seen.trials(name)).mean(0))


def _weights(seen: CaseRecords) -> np.ndarray:
    weights = seen.weights("duw-fedavg")
    if weights is None:
        raise LookupError(f"{seen.case.name} has no learned weights")
    return weights


def _quantity_skew(seen: CaseRecords) -> Iterator[Claim]:
    duw = _final(seen, "duw-fedavg")
    best = max(_final(seen, name) for name in ("fedavg", "dr-fedavg"))
    yield "DUW about equal: at most 2 points below FedAvg and DR", f"{duw - best:+.1f}", duw >= best - 2
    weights = _weights(seen)
    least = weights[1:8, 4].min()
    yield "client 4 dominates: Θ > 0.9 in rounds 2 to 8", f"at least {least:.3f}", least > 0.9
    low, high = weights[-1].min(), weights[-1].max()
    even = low >= 0.05 and high <= 0.5
    yield "nearly equal in the last round: Θ in [0.05, 0.5]", f"{low:.2f} to {high:.2f}", even


def _label_skew(seen: CaseRecords) -> Iterator[Claim]:
    duw = _final(seen, "duw-fedavg")
    best = max(_final(seen, name) for name in ("fedavg", "dr-fedavg"))
    yield "DUW reaches 73 %", f"{duw:.1f} %", duw >= 73
    yield "DUW at least 16 points above FedAvg and DR", f"{duw - best:+.1f}", duw >= best + 16
    pair = _weights(seen)[:, :2].sum(1)
    grown = pair[-1] > max(0.5, pair[0])
    yield "clients 0 and 1 grow, above half at the end", f"{pair[0]:.2f} to {pair[-1]:.2f}", grown


def _always_above(seen: CaseRecords) -> Iterator[Claim]:
    duw = _curve(seen, "duw-fedavg")
    ahead = np.min([duw - _curve(seen, name) for name in ("fedavg", "dr-fedavg")], axis=0)
    least = ahead[2:].min()
    claim = "DUW above FedAvg and DR in every round from the third on"
    yield claim, f"by at least {least:.1f}", least > 0
    yield "DUW at least 1 point above both at the end", f"{ahead[-1]:+.1f}", ahead[-1] >= 1


def _computation_skew(seen: CaseRecords) -> Iterator[Claim]:
    yield from _always_above(seen)
    least = _weights(seen)[1:8, 0].min()
    yield "client 0 dominates: Θ > 0.9 in rounds 2 to 8", f"at least {least:.3f}", least > 0.9


def _communication_skew(seen: CaseRecords) -> Iterator[Claim]:
    yield from _always_above(seen)
    participation_probability = [client.participation_probability for client in seen.case.env.clients]
    correlation = round(float(spearmanr(participation_probability, _weights(seen)[:5].mean(0)).statistic), 9)
    claim = "weights ordered by reliability: Spearman's ρ ≥ 0.9 over the first five rounds"
    yield claim, f"{correlation:.2f}", correlation >= 0.9


def _rate(seen: CaseRecords) -> Iterator[Claim]:
    rounds, variances = rate_points(seen)
    over = max(v * t**0.5 for t, v in zip(rounds, variances, strict=True))
    yield "variance below 1/√T for every T", f"at most {over:.2f} of it", over < 1
    slope, _ = rate_fit(rounds, variances)
    yield "variance falls as fast as 1/√T: slope ≤ −0.5", slopes(rounds, variances), slope <= -0.5


def _dogs(seen: CaseRecords) -> Iterator[Claim]:
    duw = _final(seen, "duw-fedavg")
    margins = {name: duw - _final(seen, name) for name in OTHERS_IN_DOGS}
    nearest = min(margins, key=lambda name: margins[name])
    claim = "DUW-FedAvg above FedAvg, DR, FedAdp and FedFa"
    yield claim, f"{margins[nearest]:+.1f} against {nearest}", margins[nearest] > 0


COMPARED = ("fedavg", "dr-fedavg", "duw-fedavg")
CLAIMS: Mapping[str, tuple[Callable[[CaseRecords], Iterator[Claim]], tuple[str, ...]]] = {
    "mnist-1": (_quantity_skew, COMPARED),
    "mnist-2": (_label_skew, COMPARED),
    "mnist-3": (_computation_skew, COMPARED),
    "mnist-4": (_communication_skew, COMPARED),
    "mnist-rate": (_rate, tuple(f"rounds-{t}" for t in RATE_ROUNDS)),
    "dogs-a": (_dogs, (*OTHERS_IN_DOGS, "duw-fedavg")),
    "dogs-b": (_dogs, (*OTHERS_IN_DOGS, "duw-fedavg")),
}
"""By case: its claims, and the rows they are about."""

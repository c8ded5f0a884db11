"""Whether learned weights are likely to help a federation, judged by what is heterogeneous about it.

The thresholds are where runs showed gains over FedAvg that stand out of the noise; they are a hint, not a bound. Gains
of `duw-fedavg` in points of test accuracy, ten rounds:

PLACEHOLDER
"""

from dataclasses import dataclass
from typing import Literal

from fedunfold.environments.heterogeneity import Heterogeneity

Verdict = Literal["likely", "perhaps", "unlikely"]

DIVERGENCE = (0.3, 0.6)  # from the first on perhaps, from the second on likely
EPOCHS = (1.5, 2.0)
RELIABILITY = (0.25, 0.5)
SIZES = 4.0  # more than perhaps was never seen from sizes alone
ABSENT = 0.75  # part of the clients in a round from which on down absences matter
OFTEN = 0.05  # rounds without anybody that are worth a warning


@dataclass(frozen=True)
class Outlook:
    """Whether learned weights are likely to help, with the reasons in plain words."""

    learned_weights: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def outlook(found: Heterogeneity) -> Outlook:
    """The strongest of what label skew, unequal epochs, unequal reliability and unequal sizes let expect."""
    if len(found.divergence) == 1:
        return Outlook("unlikely", ("there is one client, so there is nothing to weigh.",))
    likely: list[str] = []
    perhaps: list[str] = []
    furthest = max(found.divergence, key=lambda key: found.divergence[key])
    skew = f"labels differ: a client's distribution is {found.mean_divergence:.2f} away from the pooled one on average"
    skew += f", {furthest}'s {found.divergence[furthest]:.2f} (0 is alike, 1 disjoint)."
    _sort(found.mean_divergence, DIVERGENCE, skew, likely, perhaps)
    if held := _by_client(found.sole_holders):
        likely.append(f"some classes are at one client alone, whose weight decides how they are learned: {held}.")
    epochs = f"the busiest client trains {found.epochs_ratio:.3g} times as long as the laziest in a round."
    _sort(found.epochs_ratio, EPOCHS, epochs, likely, perhaps)
    flaky = f"some clients are there more often than others: reliabilities are {found.reliability_spread:.2g} apart."
    _sort(found.reliability_spread, RELIABILITY, flaky, likely, perhaps)
    if found.size_ratio >= SIZES:
        perhaps.append(f"the largest client has {found.size_ratio:.3g} times the samples of the smallest.")
    if found.expected_present <= ABSENT * len(found.divergence):
        perhaps.append(
            f"only {found.expected_present:.3g} of {len(found.divergence)} clients are expected in a round; "
            "the method fedunfold also remembers the absent ones' last updates."
        )
    warnings = []
    if found.nobody >= OFTEN:
        warnings.append(f"in {100 * found.nobody:.0f} % of the rounds nobody is there, and the model stays as it is.")
    if likely or perhaps:
        return Outlook("likely" if likely else "perhaps", (*likely, *perhaps), tuple(warnings))
    alike = "clients are alike in labels, sizes and epochs, and there when needed: weights by size are hard to beat."
    return Outlook("unlikely", (alike,), tuple(warnings))


def _sort(value: float, levels: tuple[float, float], reason: str, likely: list[str], perhaps: list[str]) -> None:
    if value >= levels[0]:
        (likely if value >= levels[1] else perhaps).append(reason)


def _by_client(sole_holders: dict[str, str], most: int = 6) -> str:
    """``site-a (2, 9), site-b (4)``; a long list is cut."""
    held: dict[str, list[str]] = {}
    for name, client in sole_holders.items():
        held.setdefault(client, []).append(name)
    parts = [
        f"{client} ({', '.join(names[:most])}{', …' if len(names) > most else ''})" for client, names in held.items()
    ]
    return ", ".join(parts[:most]) + (", …" if len(parts) > most else "")

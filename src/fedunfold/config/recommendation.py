"""Whether learned weights are likely to help a federation, judged by what is heterogeneous about it.

A hint, not a bound; docs/results/outlook compares it with what was gained, over FedAvg in ten rounds:

- Classes that one client holds alone: learned weights gained in every run, though in some next to nothing, and most
  where several classes were held so.
- Labels that differ without that, on average or at one client: a large gain in one run, next to nothing in the
  others, so perhaps.
- Epochs or participation probabilities that differ by much: a few points on MNIST and on the digits.
- Sizes alone: one or two points or less. Clients alike: nothing, by weights; `fedunfold-table` gained some points there
  too, for it also learns the server's steps, and where many are absent it gained by remembering them.
- On an easy task nothing was gained without sole classes: FedAvg had left nothing to gain. That cannot be seen from the
  clients, so even what is likely may not come true.
"""

from dataclasses import dataclass
from typing import Literal

from fedunfold.config.heterogeneity import Heterogeneity

Verdict = Literal["likely", "perhaps", "unlikely"]

DIVERGENCE = 0.3  # of the mean client, from here on perhaps
FURTHEST = 0.2  # likewise of the furthest client, where it is at least twice what it would be by chance
ALIKE = 0.1  # likewise, from here on clients are not called alike
BETWEEN = 0.14  # likewise, of the variance beyond chance; what Cohen 1988 calls a large effect
SIZES = 4.0  # likewise
EPOCHS = (1.5, 2.0)  # from the first on perhaps, from the second on likely
PARTICIPATION = (0.25, 0.5)  # likewise
ABSENT = 0.75  # part of the clients in a round from which on down absences matter
OFTEN = 0.05  # rounds without any client that are worth a warning


@dataclass(frozen=True)
class Recommendation:
    """Whether learned weights are likely to help.

    Attributes:
        learned_weights: How likely.
        reasons: What speaks for it, in plain words.
        warnings: What else is worth knowing.
    """

    learned_weights: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def recommend(found: Heterogeneity) -> Recommendation:
    """The most that labels, epochs, participation and sizes let expect.

    Args:
        found: What is heterogeneous about the federation.

    Returns:
        The verdict, with all that counts as its reasons.
    """
    if found.only_class is not None:
        reason = f"every training sample is of class {found.only_class}, so there is nothing to tell apart."
        return Recommendation(
            "unlikely", (reason,), ("check the labels: a model needs samples of at least two classes.",)
        )
    if len(found.divergence) == 1:
        return Recommendation("unlikely", ("there is one client, so there is nothing to weigh.",))
    likely: list[str] = []
    perhaps: list[str] = []
    if held := _by_client(found.sole_holders):
        likely.append(f"some classes are at one client alone, whose weight decides how they are learned: {held}.")
    if found.single_class:
        listed = [f"{key} ({name})" for key, name in found.single_class.items()]
        perhaps.append(f"some clients have one class only: {', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}.")
    furthest = max(found.divergence, key=lambda key: found.divergence[key])
    beyond = max(
        (own for key, own in found.divergence.items() if own >= 2 * found.by_chance[key] and own >= ALIKE), default=0.0
    )
    if found.mean_divergence >= DIVERGENCE or beyond >= FURTHEST:
        perhaps.append(
            f"{found.subject} differ: clients diverge from the pooled distribution by {found.mean_divergence:.2f} on "
            f"average, {furthest} by {found.divergence[furthest]:.2f} (0 is alike, 1 disjoint)."
        )
    if found.between is not None and found.between - found.between_by_chance >= BETWEEN:
        perhaps.append(
            f"{found.subject} differ: {100 * found.between:.0f} % of their variance lies between clients, where fair "
            f"samples would have {100 * found.between_by_chance:.0f} %."
        )
    epochs = f"the busiest client trains {found.epochs_ratio:.3g} times as long as the laziest in a round."
    _sort(found.epochs_ratio, EPOCHS, epochs, likely, perhaps)
    flaky = (
        "some clients take part more often than others: participation probabilities are "
        f"{found.participation_spread:.2g} apart."
    )
    _sort(found.participation_spread, PARTICIPATION, flaky, likely, perhaps)
    if found.size_ratio >= SIZES:
        perhaps.append(f"the largest client has {found.size_ratio:.3g} times the samples of the smallest.")
    if found.expected_present <= ABSENT * len(found.divergence):
        perhaps.append(
            f"only {found.expected_present:.3g} of {len(found.divergence)} clients are expected in a round; "
            "the method fedunfold-table also remembers the absent ones' last updates."
        )
    warnings = []
    if found.nobody >= OFTEN:
        warnings.append(
            f"in {100 * found.nobody:.0f} % of the rounds no client takes part, and the model stays as it is."
        )
    if likely or perhaps:
        return Recommendation("likely" if likely else "perhaps", (*likely, *perhaps), tuple(warnings))
    if beyond:
        reason = (
            f"{found.subject} differ a little, by {found.mean_divergence:.2f} on average and {beyond:.2f} at most "
            "(0 is alike, 1 disjoint); sizes, epochs and participation are alike: weights by size are hard to beat."
        )
    else:
        reason = (
            f"clients are alike in {found.subject}, sizes, epochs and participation: weights by size are hard to beat."
        )
    return Recommendation("unlikely", (reason,), tuple(warnings))


def _sort(value: float, levels: tuple[float, float], reason: str, likely: list[str], perhaps: list[str]) -> None:
    """Add a reason where the value reaches the level for it."""
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

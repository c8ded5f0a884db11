"""What the learning of weights shows, in sentences: who came to count how much, and the outer loss."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedunfold.report.grouping import Group
from fedunfold.report.text import joined
from fedunfold.runs.schema import FederationRecord, Floats, RunRecord

MOST_CLIENTS = 4
MOST_CLASSES = 6


def on_learning(group: Group) -> Iterator[str]:
    """Of all weights that were learned."""
    for run in group.runs:
        for name in run.learned:
            named = f"{name} · {run.label}" if len(group.runs) > 1 else name
            about = f"{named}: " if len(group.runs) > 1 or len(run.learned) > 1 else ""
            for sentence in (*_weights(run, name), *_outer_loss(run, name)):
                yield about + sentence


def _weights(run: RunRecord, name: str) -> Iterator[str]:
    """Clients that alone hold a class; where there is none, those that moved furthest from their size."""
    weights = run.learned[name].weights.numpy()
    shares = run.federation.shares
    shift = weights.mean(0) - np.array(shares)
    alone = only_holders(run.federation)
    for k in sorted(alone, key=lambda k: -abs(shift[k]))[:MOST_CLIENTS]:
        held = _listed([run.classes[c] for c in alone[k]])
        yield f"client {run.clients[k]} holds the only samples of {held} and {_counts(weights, shares, k)}."
    if len(alone) > MOST_CLIENTS:
        yield f"{len(alone) - MOST_CLIENTS} more clients hold classes that nobody else has; their weights moved less."
    if not alone and abs(shift).max() > 0:
        for k, how in ((int(shift.argmax()), "lifted furthest above"), (int(shift.argmin()), "held furthest below")):
            client = f"client {run.clients[k]}{_circumstances(run.federation, k)}"
            yield f"{client} is {how} its size: it {_counts(weights, shares, k)}."


def only_holders(federation: FederationRecord) -> dict[int, tuple[int, ...]]:
    """The classes that a single client has samples of, by that client."""
    alone: dict[int, tuple[int, ...]] = {}
    for label in range(federation.classes if federation.classes > 1 else 0):
        holders = [k for k, client in enumerate(federation.clients) if client.label_counts[label]]
        if len(holders) == 1:
            alone[holders[0]] = (*alone.get(holders[0], ()), label)
    return alone


def _counts(weights: Floats, shares: Sequence[float], k: int) -> str:
    mean, last = float(weights[:, k].mean()), float(weights[-1, k])
    against = f"against {weight(shares[k])} by size"
    return f"counts {weight(mean)} on average over the rounds, {weight(last)} in the last, {against}"


def _circumstances(federation: FederationRecord, k: int) -> str:
    """What sets a client apart from the others, where something does."""
    client = federation.clients[k]
    parts = []
    if len({other.participation_probability for other in federation.clients}) > 1:
        parts.append(f"reachable in {100 * client.participation_probability:.0f} % of the rounds")
    if len({other.epochs for other in federation.clients}) > 1:
        parts.append(f"{epochs_of(client.epochs)} a round")
    return f" ({', '.join(parts)})" if parts else ""


def _outer_loss(run: RunRecord, name: str) -> Iterator[str]:
    losses = run.learned[name].losses.numpy()
    if len(losses) < 2:
        return
    first, last, lowest = float(losses[0]), float(losses[-1]), int(losses.argmin())
    verb = "fell" if last < first else "rose" if last > first else "stayed"
    text = f"the outer loss {verb} from {loss_in_words(first)} to {loss_in_words(last)} in {len(losses)} iterations"
    if losses[lowest] < last - 0.001 * abs(last):
        text += f", and was lowest at iteration {lowest + 1} with {loss_in_words(float(losses[lowest]))}"
    yield f"{text}."


# --- words -------------------------------------------------------------------------------------------------


def weight(value: float) -> str:
    """A weight with two digits that mean something.

    >>> weight(0.314), weight(0.00492), weight(0.0000002)
    ('0.31', '0.0049', 'less than 0.001')
    """
    return "less than 0.001" if value < 0.001 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def epochs_of(epochs: int | Sequence[int]) -> str:
    """
    >>> epochs_of(1), epochs_of((1, 3, 2))
    ('1 epoch', '1 to 3 epochs')
    """
    few, many = (epochs, epochs) if isinstance(epochs, int) else (min(epochs), max(epochs))
    return f"{few} to {many} epochs" if few < many else f"{few} epoch{'s' if few > 1 else ''}"


def loss_in_words(value: float) -> str:
    """
    >>> loss_in_words(53561.2), loss_in_words(0.123456)
    ('53,561', '0.1235')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["ill"]), _listed("29"), _listed("abcdefghijkl")
    ('class ill', 'classes 2 and 9', 'classes a, b, c, d, e, f and 6 more')
    """
    if len(names) == 1:
        return f"class {names[0]}"
    if len(names) > MOST_CLASSES:
        names = [*names[:MOST_CLASSES], f"{len(names) - MOST_CLASSES} more"]
    return f"classes {joined(names)}"

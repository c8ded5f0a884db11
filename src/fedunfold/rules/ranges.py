"""Where a round's features lie outside the range [a, b] that a rule was learned on, and what is said about it."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import Tensor

from fedunfold.core.warnings import of_ranges
from fedunfold.rules.arrays import Array, functions_of

NARROWEST = 1e-6
"""A feature that did not vary while the rule was learned has a range of this length."""
NOTED = 0.01
"""An excess below this changes a decision by less than 1 %, and nothing is said of it."""


class Outside(TypedDict):
    """A feature that was outside its range: the largest `excess`, the `value` there, and the `rounds`."""

    excess: float
    value: float
    rounds: list[int]


Notes = Mapping[str, Outside]
"""By the feature's place, as text, since a rule's state is made of plain values."""


def excess(z: Array, ranges: Array) -> Array:
    """max(0, a − z, z − b)/(b − a) of every feature.

    Args:
        z: The features, [..., F].
        ranges: a and b, [2, F].
    """
    lowest, highest = ranges
    found: Array = functions_of(z).maximum(lowest - z, z - highest).clip(min=0) / (highest - lowest).clip(min=NARROWEST)
    return found


def noted(z: Array, ranges: Array, t: int, before: Notes) -> Notes:
    """The notes of the rounds before, and of round t.

    Args:
        z: The features of the round, [n, F].
        ranges: a and b, [2, F].
        t: The round.
        before: Those of the rounds before.
    """
    found = excess(z, ranges)
    if not (found > NOTED).any():
        return before
    notes = dict(before)
    for i, k in enumerate(found.argmax(0).tolist()):
        if found[k, i] <= NOTED:
            continue
        now: Outside = {"excess": float(found[k, i]), "value": float(z[k, i]), "rounds": [t]}
        known: Outside = before.get(str(i), now)
        farthest = max(known, now, key=lambda note: note["excess"])
        rounds = [*known["rounds"], *([t] if t not in known["rounds"] else [])]
        notes[str(i)] = {"excess": farthest["excess"], "value": farthest["value"], "rounds": rounds}
    return notes


def remark(notes: Notes, names: Sequence[str], ranges: Tensor) -> str:
    """One line about all rounds, the feature farthest out first.

    Args:
        notes: Those of the whole run.
        names: Of the features.
        ranges: a and b, [2, F].
    """
    order = sorted(map(int, notes), key=lambda i: -notes[str(i)]["excess"])
    return of_ranges(
        {names[i]: (notes[str(i)]["value"], *ranges[:, i].tolist()) for i in order},
        [[t + 1 for t in notes[str(i)]["rounds"]] for i in order],
    )

"""How much single clients counted: what the mean of the weights over trials and absences would hide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Peak:
    """The largest weight that one client had in a round in which others took part too.

    Attributes:
        client: Its number.
        round: The round, from 0.
        weight: Its part of the weight of all.
    """

    client: int
    round: int
    weight: float


@dataclass(frozen=True, eq=False)
class Influence:
    """Weights as used, over the rounds in which clients took part.

    Attributes:
        when_present: The mean weight of each client over the rounds of all trials in which it took part, [K]; NaN for
            one that never did.
        peak: The largest weight in a round; None where no round had two clients.

    >>> found = Influence.of([[[0.5, 0.5], [0.9, 0.1]]], [[[True, True], [True, False]]])
    >>> found.when_present.tolist(), found.peak
    ([0.7, 0.5], Peak(client=0, round=0, weight=0.5))
    """

    when_present: NDArray[np.float64]
    peak: Peak | None

    @classmethod
    def of(cls, weights: Sequence[object], participated: Sequence[object]) -> Self:
        """That of some trials, which may differ in length.

        Args:
            weights: Of every trial, [T, K].
            participated: Who took part in every trial, [T, K].
        """
        used = [np.asarray(trial, dtype=np.float64) for trial in weights]
        took = [np.asarray(trial, dtype=bool) for trial in participated]
        rounds = np.concatenate([np.arange(len(trial)) for trial in used])
        each, present = np.concatenate(used), np.concatenate(took)
        counts = present.sum(0)
        total = np.where(present, each, 0.0).sum(0)
        mean = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
        shared = np.flatnonzero(present.sum(1) > 1)
        if not len(shared):
            return cls(mean, None)
        row, client = np.unravel_index(int(each[shared].argmax()), each[shared].shape)
        where = shared[row]
        return cls(mean, Peak(int(client), int(rounds[where]), float(each[where, client])))

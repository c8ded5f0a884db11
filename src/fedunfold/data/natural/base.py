"""What the natural federations share: their settings, the test rows of each client, and features on one scale."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedunfold.core.settings import Natural, Settings
from fedunfold.data.importers.imported import split_off_test
from fedunfold.data.sources import Pair

Clients = dict[str, Pair]


class NaturalSource(Settings):
    """Data that come divided by their own clients."""

    @abstractmethod
    def load_clients(self) -> tuple[Clients, Pair]:
        """(x, y) of the training rows by client, and (x, y) of the test set."""


class HeldOutSource(NaturalSource):
    """A natural federation without a test set of its own: a part of every client's rows becomes it.

    Attributes:
        test_fraction: The part of each client's rows, and of each class among them, to test on.
        seed: Draws them.
    """

    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    seed: Natural = 0

    def split_by_owner(
        self, x: NDArray[Any], y: NDArray[Any], owners: Sequence[str], classes: tuple[str, ...] = ()
    ) -> tuple[Clients, Pair]:
        """Give every owner its rows and hold out its test rows; features are standardised.

        Args:
            x: Features [N, D]; NaN where one is missing.
            y: Targets [N].
            owners: The client of each row.
            classes: Their names, where y are class numbers.

        Returns:
            (x, y) by client, and (x, y) of the test set.
        """
        rows = np.arange(len(y))
        strata = y if classes else np.zeros(len(y), dtype=np.int64)
        by = np.asarray(owners)
        held = {str(key): (rows[by == key], strata[by == key]) for key in dict.fromkeys(owners)}
        train, (test, _) = split_off_test(held, classes or ("",), self.test_fraction, self.seed)
        x = standardise(x, np.concatenate([own for own, _ in train.values()]))
        return {key: (x[own], y[own]) for key, (own, _) in train.items()}, (x[test], y[test])


def standardise(x: NDArray[Any], train: NDArray[np.int64]) -> NDArray[np.float32]:
    """(x − mean)/deviation with the statistics of the training rows of all clients; test rows have no part in them.

    A gap takes the median of its column first; a constant column becomes 0. Only a simulation can pool rows so: real
    sites would agree on these numbers, or each take its own.

    Args:
        x: Features [N, D]; NaN where one is missing.
        train: The training rows.

    Returns:
        The features on one scale, [N, D].

    >>> standardise(np.array([[0.0, 1.0], [2.0, 1.0], [np.nan, 5.0]]), np.array([0, 1])).tolist()
    [[-1.0, 0.0], [1.0, 0.0], [0.0, 4.0]]
    """
    known = x[train]
    gaps = np.isnan(known).all(0)
    median = np.where(gaps, 0.0, np.nanmedian(np.where(gaps, 0.0, known), axis=0))
    filled = np.where(np.isnan(x), median, x)
    mean, deviation = filled[train].mean(0), filled[train].std(0)
    constant = np.ptp(filled[train], axis=0) == 0  # rounding may leave a deviation, by which a test row would explode
    result: NDArray[np.float32] = ((filled - mean) / np.where(constant, 1.0, deviation)).astype(np.float32)
    return result

"""What a federation trains and tests on, checked once and then trusted by every engine."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.data.arrays import features, labels
from fedunfold.io.limits import CLASSES


@dataclass(frozen=True, eq=False)
class FederatedData:
    """All clients' samples in two tensors, one client after the other, and a test set none of them has.

    Attributes:
        keys: The clients.
        x: Samples of all clients, float32 [N, *features].
        y: Their class numbers, int64 [N] in [0, classes).
        offsets: Client k owns rows offsets[k]:offsets[k+1].
        x_test: Samples of the test set.
        y_test: Their class numbers.
        classes: How many classes there are.
    """

    keys: tuple[str, ...]
    x: Tensor
    y: Tensor
    offsets: tuple[int, ...]
    x_test: Tensor
    y_test: Tensor
    classes: int

    def __repr__(self) -> str:
        """Counts only: samples of a federation have no business in a log."""
        return f"FederatedData(clients={len(self.keys)}, samples={len(self.y)}, classes={self.classes})"

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[str, tuple[ArrayLike, ArrayLike]],
        test: tuple[ArrayLike, ArrayLike],
        classes: int | None = None,
    ) -> "FederatedData":
        """Check and join the arrays of all clients.

        Args:
            clients: (x, y) by client, in the order that the federation has.
            test: (x, y) of the test set.
            classes: The number of classes; without it, the highest label plus one.

        Returns:
            The checked data.

        Raises:
            InputError: An array cannot be used; the message names its client.
        """
        if not clients:
            raise InputError("There are no clients; give at least one with its x and y.")
        owners = {f"client {key}": pair for key, pair in clients.items()} | {"the test set": test}
        for owner, pair in owners.items():
            if len(pair) != 2:
                raise InputError(f"{owner} has {len(pair)} arrays; give it a pair (x, y).")
        x = list(features({f"x of {owner}": pair[0] for owner, pair in owners.items()}).values())
        y = [
            labels(pair[1], f"y of {owner}", len(rows), classes)
            for (owner, pair), rows in zip(owners.items(), x, strict=True)
        ]
        found = classes if classes is not None else 1 + max(int(part.max()) for part in y)
        if found < 2:
            raise InputError(f"The labels make {found} class(es); a classifier needs 2 or more.")
        CLASSES.check(found, "The labels make too many classes: ")
        return cls(
            keys=tuple(clients),
            x=torch.from_numpy(np.concatenate(x[:-1])),
            y=torch.from_numpy(np.concatenate(y[:-1])),
            offsets=_offsets([len(part) for part in y[:-1]]),
            x_test=torch.from_numpy(x[-1].copy()),
            y_test=torch.from_numpy(y[-1].copy()),
            classes=found,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """N_k."""
        return tuple(np.diff(self.offsets).tolist())

    @cached_property
    def label_counts(self) -> Tensor:
        """How many samples of class c client k has, int64 [K, C]."""
        owner = torch.arange(len(self.keys)).repeat_interleave(torch.tensor(self.sizes))
        cells = torch.bincount(owner * self.classes + self.y, minlength=len(self.keys) * self.classes)
        return cells.reshape(len(self.keys), self.classes)

    @cached_property
    def checksum(self) -> str:
        """Stands for every sample and who holds it."""
        found = hashlib.sha256(repr((self.keys, self.offsets, self.classes)).encode())
        for part in (self.x, self.y, self.x_test, self.y_test):
            found.update(part.contiguous().numpy().data)
        return found.hexdigest()

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """(x, y) of client k, as views."""
        rows = slice(self.offsets[k], self.offsets[k + 1])
        return self.x[rows], self.y[rows]

    def restricted(self, fraction: float, seed: int) -> "FederatedData":
        """Leave every client ⌈fraction · N_k⌉ of its rows, drawn by (seed, its key), in their old order.

        Args:
            fraction: The part that is left.
            seed: Draws the rows.

        Returns:
            The same federation with fewer samples.
        """
        if not 0 < fraction <= 1:
            raise InputError(f"The fraction of data used must lie in (0, 1], not {fraction}.")
        return self if fraction == 1 else self._with_rows(self._drawn(fraction, seed, "fraction"))

    def held_out(self, fraction: float, seed: int) -> "FederatedData":
        """Make a part of every client's rows the test set.

        For choosing among settings: the real test set stays unseen.

        Args:
            fraction: The part of each client's rows.
            seed: Draws them.

        Returns:
            The same federation with fewer training samples and another test set.
        """
        if not 0 < fraction < 1:
            raise InputError(f"The fraction of data held out must lie in (0, 1), not {fraction}.")
        train = self._drawn(1 - fraction, seed, "held-out")
        test = torch.ones(len(self.y), dtype=torch.bool)
        test[np.concatenate(train)] = False
        if not bool(test.any()):
            raise InputError(f"Holding out {fraction} of such small clients leaves nothing to test on; hold out more.")
        return replace(self._with_rows(train), x_test=self.x[test], y_test=self.y[test])

    def _drawn(self, fraction: float, seed: int, purpose: str) -> list[np.ndarray]:
        """⌈fraction · N_k⌉ rows of every client."""
        drawn = []
        for key, start, size in zip(self.keys, self.offsets, self.sizes, strict=False):
            # Rounding first: 0.1 · 30 is a hair above 3 in floating point and would draw a fourth row.
            count = max(1, math.ceil(round(fraction * size, 9)))
            drawn.append(start + np.sort(generator(seed, purpose, key).permutation(size)[:count]))
        return drawn

    def _with_rows(self, rows: list[np.ndarray]) -> "FederatedData":
        """The same with these rows of every client only."""
        chosen = torch.from_numpy(np.concatenate(rows))
        return replace(self, x=self.x[chosen], y=self.y[chosen], offsets=_offsets([len(part) for part in rows]))


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    return (0, *(int(end) for end in np.cumsum(sizes)))

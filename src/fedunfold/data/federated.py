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

    `x[N, *features]` is float32, `y[N]` int64 in [0, classes); client k owns rows offsets[k]:offsets[k+1].
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
        """Check and join (x, y) of every client, in the mapping's order.

        Without `classes`, C is the highest label met anywhere plus one.
        """
        if not clients:
            raise InputError("There are no clients; give at least one with its x and y.")
        owners = {f"client {key}": pair for key, pair in clients.items()} | {"the test set": test}
        for owner, pair in owners.items():
            if len(pair) != 2:
                raise InputError(f"{owner} has {len(pair)} arrays; give it a pair (x, y).")
        x = features({f"x of {owner}": pair[0] for owner, pair in owners.items()})
        rows = list(x.values())
        y = [
            labels(pair[1], f"y of {owner}", len(row), classes)
            for (owner, pair), row in zip(owners.items(), rows, strict=True)
        ]
        found = classes if classes is not None else 1 + max(int(part.max()) for part in y)
        if found < 2:
            raise InputError(f"The labels make {found} class(es); a classifier needs 2 or more.")
        CLASSES.check(found, "The labels make too many classes: ")
        return cls(
            keys=tuple(clients),
            x=torch.from_numpy(np.concatenate(rows[:-1])),
            y=torch.from_numpy(np.concatenate(y[:-1])),
            offsets=_offsets([len(part) for part in y[:-1]]),
            x_test=torch.from_numpy(rows[-1].copy()),
            y_test=torch.from_numpy(y[-1].copy()),
            classes=found,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """N_k."""
        return tuple(end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False))

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
        """Each client keeps ⌈fraction · N_k⌉ of its rows, drawn by (seed, its key), in their old order."""
        if not 0 < fraction <= 1:
            raise InputError(f"The fraction of data kept must lie in (0, 1], not {fraction}.")
        return self if fraction == 1 else self._with_rows(self._drawn(fraction, seed, "fraction"))

    def held_out(self, fraction: float, seed: int) -> "FederatedData":
        """Each client gives up `fraction` of its rows, and these are the test set.

        For choosing among settings: the real test set stays unseen.
        """
        if not 0 < fraction < 1:
            raise InputError(f"The fraction of data held out must lie in (0, 1), not {fraction}.")
        kept = self._drawn(1 - fraction, seed, "held-out")
        away = torch.ones(len(self.y), dtype=torch.bool)
        away[np.concatenate(kept)] = False
        if not bool(away.any()):
            raise InputError(f"Holding out {fraction} of such small clients leaves nothing to test on; hold out more.")
        return replace(self._with_rows(kept), x_test=self.x[away], y_test=self.y[away])

    def _drawn(self, fraction: float, seed: int, purpose: str) -> list[np.ndarray]:
        """⌈fraction · N_k⌉ rows of every client."""
        drawn = []
        for key, start, size in zip(self.keys, self.offsets, self.sizes, strict=False):
            # Rounding first: 0.1 · 30 is a hair above 3 in floating point and would keep a fourth row.
            count = max(1, math.ceil(round(fraction * size, 9)))
            drawn.append(start + np.sort(generator(seed, purpose, key).permutation(size)[:count]))
        return drawn

    def _with_rows(self, rows: list[np.ndarray]) -> "FederatedData":
        kept = torch.from_numpy(np.concatenate(rows))
        return replace(self, x=self.x[kept], y=self.y[kept], offsets=_offsets([len(part) for part in rows]))


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    return (0, *(int(end) for end in np.cumsum(sizes)))

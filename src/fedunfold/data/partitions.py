"""Which client owns which training row.

Each partition takes the labels y[N] and returns K sorted index arrays that share no row and are never empty. Clients
are numbered from 0 in messages, in the order of the environment.
"""

from collections import Counter
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.data.arrays import Labels

Indices = NDArray[np.int64]


class Seeded(Settings):
    """A partition that draws. Its seed is its own: another seed of the environment moves no data.

    Attributes:
        seed: Draws who owns what.
    """

    seed: Natural = 0


class IidPartition(Seeded):
    """All rows, shuffled, in K parts whose sizes differ by at most one."""

    kind: Literal["iid"] = "iid"

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_row_each(y, clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(y)), clients)]


class SizesPartition(Seeded):
    """N_k random rows for client k; rows beyond ΣN_k stay unused.

    Attributes:
        sizes: N_k.
    """

    kind: Literal["sizes"] = "sizes"
    sizes: tuple[Count, ...]

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        total = sum(self.sizes)
        if total > len(y):
            raise InputError(f"The sizes add up to {total} but there are {len(y)} samples; lower them.")
        return [np.sort(part) for part in np.split(rng.permutation(len(y))[:total], np.cumsum(self.sizes)[:-1])]


class LabelsPartition(Seeded):
    """Client k gets rows of its labels only.

    With sizes, N_k rows, ⌊N_k/|labels|⌋ of each label and one more of the first N_k mod |labels|. Without, each label's
    rows are divided evenly among the clients that list it.

    Attributes:
        labels: The labels of each client.
        sizes: N_k.
    """

    kind: Literal["labels"] = "labels"
    labels: tuple[tuple[Natural, ...], ...]
    sizes: tuple[Count, ...] | None = None

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        for k, own in enumerate(self.labels):
            if not own or len(set(own)) != len(own):
                raise InputError(f"Client {k} lists the labels {list(own)}; list at least one, and each once.")
        parts: list[list[Indices]] = [[] for _ in self.labels]
        for label in sorted({label for own in self.labels for label in own}):
            rows = rng.permutation(np.flatnonzero(y == label))
            holders = [k for k, own in enumerate(self.labels) if label in own]
            start = 0
            for k, count in zip(holders, self._counts(label, len(rows), holders), strict=True):
                if start + count > len(rows):
                    raise InputError(
                        f"Client {k} needs {count} samples of label {label} but {len(rows) - start} of "
                        f"{len(rows)} are left; lower the sizes of the clients that hold it."
                    )
                parts[k].append(rows[start : start + count])
                start += count
        return [np.sort(np.concatenate(part)) for part in parts]

    def _counts(self, label: int, rows: int, holders: list[int]) -> list[int]:
        """How many rows of the label each holder gets."""
        if self.sizes is not None:
            own = {k: (self.sizes[k], self.labels[k]) for k in holders}
            return [size // len(held) + (held.index(label) < size % len(held)) for size, held in own.values()]
        _require_a_row_of(f"Label {label}", rows, holders)
        return [len(part) for part in np.array_split(np.arange(rows), len(holders))]


class SharesPartition(Seeded):
    """Each class goes to the clients that list it, in proportion to their shares; at least one row each.

    A class that nobody lists is left out.

    Attributes:
        shares: [class, share] pairs of each client.
    """

    kind: Literal["shares"] = "shares"
    shares: tuple[tuple[tuple[Natural, Annotated[float, Field(gt=0)]], ...], ...]

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in self.shares]
        holders: dict[int, dict[int, float]] = {}
        for k, own in enumerate(self.shares):
            if not own:
                raise InputError(f"Client {k} lists no class; give it at least one.")
            for label, share in own:
                if k in holders.setdefault(label, {}):
                    raise InputError(f"Client {k} lists class {label} twice; list it once.")
                holders[label][k] = share
        for label, wanted in sorted(holders.items()):
            rows = rng.permutation(np.flatnonzero(y == label))
            _require_a_row_of(f"Class {label}", len(rows), list(wanted))
            # One row each first, so that a client never loses a class it was given; the rest by share.
            proportions = np.array(list(wanted.values())) / sum(wanted.values())
            counts = np.maximum(1, np.floor(proportions * len(rows))).astype(np.int64)
            counts[np.argmax(counts)] += len(rows) - counts.sum()
            for k, more in zip(wanted, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                parts[k].append(more)
        return [np.sort(np.concatenate(part)) for part in parts]


class DirichletPartition(Seeded):
    """Each class is spread over the clients in proportions p ~ Dirichlet(α, …, α), all rows used.

    p = G/ΣG with G_k ~ Gamma(α). For small α every G underflows, so it is drawn as log G = log Gamma(α+1) + log(U)/α
    and normalised in log space. A client left without any row then takes one from the client that has most.

    Attributes:
        alpha: The smaller, the fewer classes a client has. Beyond the bounds the draw in log space leaves float64, and
            the split no longer changes.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(ge=1e-9, le=1e9)

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_row_each(y, clients)
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(y):
            rows = rng.permutation(np.flatnonzero(y == label))
            uniform = 1 - rng.random(clients)  # in (0, 1], so that its logarithm is finite
            log_gamma = np.log(rng.standard_gamma(self.alpha + 1, clients)) + np.log(uniform) / self.alpha
            proportions = np.exp(log_gamma - log_gamma.max())
            # Rounded, not floored: a sum of 1 − 1e-16 must not hand a row to a client whose share is 0.
            cuts = np.rint(np.cumsum(proportions / proportions.sum()) * len(rows)).astype(np.int64)[:-1]
            for part, more in zip(parts, np.split(rows, cuts), strict=True):
                part.extend(more.tolist())
        for part in parts:
            if not part:
                largest = max(parts, key=len)
                part.append(largest.pop(int(rng.integers(len(largest)))))
        return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


class IndicesPartition(Settings):
    """Exactly the rows listed, each owned by one client at most.

    Attributes:
        indices: The rows of each client.
    """

    kind: Literal["indices"] = "indices"
    indices: tuple[tuple[Natural, ...], ...]

    def split(self, y: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        for k, own in enumerate(self.indices):
            if not own:
                raise InputError(f"Client {k} lists no row; give it at least one.")
            if max(own) >= len(y):
                raise InputError(f"Client {k} lists row {max(own)} but the rows are 0 to {len(y) - 1}.")
        uses = Counter(row for own in self.indices for row in own)
        row, count = uses.most_common(1)[0]
        if count > 1:
            owners = [k for k, own in enumerate(self.indices) if row in own]
            raise InputError(f"Row {row} is listed more than once, by client(s) {owners}; list it once.")
        return [np.sort(np.asarray(own, dtype=np.int64)) for own in self.indices]


class GivenPartition(Settings):
    """The source already holds every client's own arrays."""

    kind: Literal["given"] = "given"


Partition = Annotated[
    IidPartition
    | SizesPartition
    | LabelsPartition
    | SharesPartition
    | DirichletPartition
    | IndicesPartition
    | GivenPartition,
    Field(discriminator="kind"),
]


def _require_a_row_each(y: Labels, clients: int) -> None:
    if not 1 <= clients <= len(y):
        raise InputError(f"{len(y)} samples cannot give each of {clients} clients one; use fewer clients.")


def _require_a_row_of(what: str, rows: int, holders: list[int]) -> None:
    if rows < len(holders):
        raise InputError(f"{what} has {rows} samples for {len(holders)} clients, {holders}; take it from some of them.")

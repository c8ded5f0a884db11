"""Which client owns which training row.

Each function takes the labels y[N] and returns K sorted index arrays that share no row and are never empty.
Clients are numbered from 0 in messages, in the order of the description.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError

Indices = NDArray[np.int64]

ALPHA_RANGE = (1e-9, 1e9)  # beyond it the log-space draw leaves float64, and the split no longer changes


def iid(y: NDArray[np.int64], clients: int, rng: np.random.Generator) -> list[Indices]:
    """All rows, shuffled, in K parts whose sizes differ by at most one."""
    _require_a_row_each(y, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(y)), clients)]


def by_sizes(y: NDArray[np.int64], sizes: Sequence[int], rng: np.random.Generator) -> list[Indices]:
    """N_k random rows for client k; rows beyond ΣN_k stay unused."""
    _require_positive(sizes)
    if sum(sizes) > len(y):
        raise InputError(f"The sizes add up to {sum(sizes)} but there are {len(y)} samples; lower them.")
    order = rng.permutation(len(y))[: sum(sizes)]
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def by_labels(
    y: NDArray[np.int64],
    label_sets: Sequence[Sequence[int]],
    sizes: Sequence[int] | None,
    rng: np.random.Generator,
) -> list[Indices]:
    """Client k gets rows of its labels only.

    With sizes, N_k rows, ⌊N_k/|labels|⌋ of each label and one more of the first N_k mod |labels|. Without,
    each label's rows are dealt evenly to the clients that list it.
    """
    for k, own in enumerate(label_sets):
        if not own or len(set(own)) != len(own):
            raise InputError(f"Client {k} lists the labels {list(own)}; list at least one, and each once.")
    if sizes is not None:
        _require_positive(sizes)
        if len(sizes) != len(label_sets):
            raise InputError(f"There are {len(sizes)} sizes for {len(label_sets)} label sets; give one each.")
    parts: list[list[Indices]] = [[] for _ in label_sets]
    for label in sorted({label for own in label_sets for label in own}):
        rows = rng.permutation(np.flatnonzero(y == label))
        holders = [k for k, own in enumerate(label_sets) if label in own]
        if sizes is None:
            if len(rows) < len(holders):
                raise InputError(
                    f"Label {label} has {len(rows)} samples for {len(holders)} clients, {holders}; "
                    "take it from some of them."
                )
            counts = [len(part) for part in np.array_split(rows, len(holders))]
        else:
            counts = [_share(sizes[k], label_sets[k], label) for k in holders]
        start = 0
        for k, count in zip(holders, counts, strict=True):
            if start + count > len(rows):
                raise InputError(
                    f"Client {k} needs {count} samples of label {label} but {len(rows) - start} of "
                    f"{len(rows)} are left; lower the sizes of the clients that hold it."
                )
            parts[k].append(rows[start : start + count])
            start += count
    return [np.sort(np.concatenate(part)) for part in parts]


def _share(size: int, own: Sequence[int], label: int) -> int:
    return size // len(own) + (list(own).index(label) < size % len(own))


def dirichlet(y: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Each class is spread over the clients in proportions p ~ Dirichlet(α, …, α), all rows used.

    p = G/ΣG with G_k ~ Gamma(α). For small α every G underflows, so it is drawn as
    log G = log Gamma(α+1) + log(U)/α and normalised in log space. A client left without any row then takes
    one from the client that has most.
    """
    _require_a_row_each(y, clients)
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise InputError(f"Dirichlet's alpha must lie in [{low:g}, {high:g}], not {alpha}.")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        uniform = 1 - rng.random(clients)  # in (0, 1], so that its logarithm is finite
        log_gamma = np.log(rng.standard_gamma(alpha + 1, clients)) + np.log(uniform) / alpha
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


def by_shares(
    y: NDArray[np.int64], shares: Sequence[Sequence[tuple[int, float]]], rng: np.random.Generator
) -> list[Indices]:
    """Each class goes to the clients that list it, in proportion to their shares; at least one row each.

    A class that nobody lists is left out.
    """
    parts: list[list[Indices]] = [[] for _ in shares]
    holders: dict[int, dict[int, float]] = {}
    for k, own in enumerate(shares):
        if not own:
            raise InputError(f"Client {k} lists no class; give it at least one.")
        for label, share in own:
            if k in holders.setdefault(label, {}):
                raise InputError(f"Client {k} lists class {label} twice; list it once.")
            holders[label][k] = share
    for label, wanted in sorted(holders.items()):
        rows = rng.permutation(np.flatnonzero(y == label))
        if len(rows) < len(wanted):
            raise InputError(
                f"Class {label} has {len(rows)} samples for {len(wanted)} clients, {list(wanted)}; "
                "take it from some of them."
            )
        # One row each first, so that a client never loses a class it was given; the rest by share.
        proportions = np.array(list(wanted.values())) / sum(wanted.values())
        counts = np.maximum(1, np.floor(proportions * len(rows))).astype(np.int64)
        counts[np.argmax(counts)] += len(rows) - counts.sum()
        for k, more in zip(wanted, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            parts[k].append(more)
    return [np.sort(np.concatenate(part)) for part in parts]


def by_indices(y: NDArray[np.int64], indices: Sequence[Sequence[int]]) -> list[Indices]:
    """Exactly the rows listed, each owned by one client at most."""
    for k, own in enumerate(indices):
        if not len(own):
            raise InputError(f"Client {k} lists no row; give it at least one.")
        wrong = next((row for row in own if not 0 <= row < len(y)), None)
        if wrong is not None:
            raise InputError(f"Client {k} lists row {wrong} but the rows are 0 to {len(y) - 1}.")
    uses = Counter(row for own in indices for row in own)
    twice = next((row for row, count in uses.items() if count > 1), None)
    if twice is not None:
        owners = [k for k, own in enumerate(indices) if twice in own]
        raise InputError(f"Row {twice} is listed more than once, by client(s) {owners}; list it once.")
    return [np.sort(np.asarray(own, dtype=np.int64)) for own in indices]


def _require_a_row_each(y: NDArray[np.int64], clients: int) -> None:
    if not 1 <= clients <= len(y):
        raise InputError(f"{len(y)} samples cannot give each of {clients} clients one; use fewer clients.")


def _require_positive(sizes: Sequence[int]) -> None:
    for k, size in enumerate(sizes):
        if size < 1:
            raise InputError(f"Client {k} has size {size}; give it at least 1.")

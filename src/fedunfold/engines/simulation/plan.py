"""The minibatches of a round, drawn ahead of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedunfold.engines.simulation.backends.cpu import last_rows, shuffle_rows
from fedunfold.engines.simulation.schedule import ClientSlice, DeviceBatchPlan, RoundRng, upload

Clients = Sequence[tuple[RoundRng, ClientSlice]]
"""What each draws by, and its share."""


@dataclass(frozen=True)
class BatchPlan:
    """Minibatches of several clients side by side, clients with more steps first.

    `rows[S, L, B]` are rows of the data, `counts[S, L]` how many of them are real; `order[l]` is the client in
    lane l, and the first `active[τ]` lanes still train at step τ. `draws[l]` are that lane's draw and client key.
    """

    order: tuple[int, ...]
    active: tuple[int, ...]
    rows: np.ndarray
    counts: np.ndarray
    draws: tuple[tuple[RoundRng, str], ...]

    def on(self, device: torch.device, dtype: torch.dtype) -> "DeviceBatchPlan":
        """The plan where a walk needs it."""
        rows, counts = upload(self.rows, device), upload(self.counts, device)[..., None]
        real = torch.arange(self.rows.shape[2], device=device) < counts
        means = real.to(dtype) / counts.clamp(min=1)
        return DeviceBatchPlan(self.order, self.active, rows, self.counts, self.draws, means)


def plan(clients: Clients, batch_size: int, width: int, threads: int = 1) -> BatchPlan:
    """The minibatches of clients in a round, or in a round of several runs: every epoch is reshuffled, and its last
    minibatch short. `width` is the number of rows they are padded to, whoever is there; `threads` may draw them."""
    order = sorted(range(len(clients)), key=lambda i: -clients[i][1].steps(batch_size))
    ordered = [clients[index] for index in order]
    shape = ordered[0][1].steps(batch_size), len(order)
    rows, counts = np.empty((*shape, width), dtype=np.int32), np.zeros(shape, dtype=np.int32)
    rows[:] = np.array([share.start for _, share in ordered], dtype=np.int32)[:, None]
    epochs = []
    for lane, (_, share) in enumerate(ordered):
        steps = share.steps(batch_size)
        per_epoch = steps // share.epochs
        epochs += [(lane, first, share.size) for first in range(0, steps, per_epoch)]
        counts[:steps, lane] = np.tile(np.minimum(width, share.size - width * np.arange(per_epoch)), share.epochs)
    shuffle_rows(rows, _keys(ordered), np.array(epochs), threads)
    draws = tuple((draw, share.key) for draw, share in ordered)
    return BatchPlan(tuple(order), tuple((counts > 0).sum(1).tolist()), rows, counts, draws)


def sample_coefficients(clients: Clients, batch_size: int) -> np.ndarray:
    """Σ_e 1/|b_e(i)| of every sample i, one client after the other: how often and how much it counts when all
    minibatches of a round meet the same model.

    That is E_k/B, and more for those who came into a short minibatch, the last of an epoch.
    """
    sizes = np.array([share.size for _, share in clients])
    epochs = np.array([share.epochs for _, share in clients])
    width = min(batch_size, int(sizes.max()))
    size, begin = np.repeat(sizes, epochs), np.repeat(np.cumsum(sizes) - sizes, epochs)
    short = size % width
    rows = np.repeat(begin, short) + last_rows(size, short, _keys(clients))
    more = np.repeat(1 / np.maximum(short, 1) - 1 / width, short)
    return np.repeat(epochs / width, sizes) + np.bincount(rows, more, sizes.sum())


def _keys(clients: Clients) -> np.ndarray:
    """What the order in every epoch of every client is drawn with."""
    return np.array([draw.philox_key(share.key, epoch) for draw, share in clients for epoch in range(share.epochs)])

"""The minibatches of a round, drawn ahead of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedunfold.simulation.native import shuffle_rows
from fedunfold.simulation.schedule import Draw, Schedule, Share, upload


@dataclass(frozen=True)
class Plan:
    """Minibatches of several clients side by side, clients with more steps first.

    `rows[S, L, B]` are rows of the data, `counts[S, L]` how many of them are real; `order[l]` is the client in
    lane l, and the first `active[τ]` lanes still train at step τ. `draws[l]` are that lane's draw and client key.
    """

    order: tuple[int, ...]
    active: tuple[int, ...]
    rows: np.ndarray
    counts: np.ndarray
    draws: tuple[tuple[Draw, str], ...]

    def on(self, device: torch.device, dtype: torch.dtype) -> "Schedule":
        """The plan where a walk needs it."""
        rows, counts = upload(self.rows, device), upload(self.counts, device)[..., None]
        real = torch.arange(self.rows.shape[2], device=device) < counts
        means = real.to(dtype) / counts.clamp(min=1)
        return Schedule(self.order, self.active, rows, self.counts, self.draws, means)


def plan(walks: Sequence[tuple[Draw, Share]], batch_size: int, width: int, threads: int = 1) -> Plan:
    """The minibatches of clients in a round, or in a round of several runs: every epoch is reshuffled, and its last
    minibatch short. `width` is the number of rows they are padded to, whoever is there; `threads` may draw them."""
    order = sorted(range(len(walks)), key=lambda i: -walks[i][1].steps(batch_size))
    longest = walks[order[0]][1].steps(batch_size)
    rows = np.empty((longest, len(order), width), dtype=np.int32)
    rows[:] = np.array([walks[index][1].start for index in order], dtype=np.int32)[:, None]
    counts = np.zeros((longest, len(order)), dtype=np.int32)
    keys, epochs = [], []
    for lane, index in enumerate(order):
        draw, share = walks[index]
        per_epoch = share.steps(batch_size) // share.epochs
        for epoch in range(share.epochs):
            keys.append(draw.philox_key(share.key, epoch))
            epochs.append((lane, epoch * per_epoch, share.size))
            steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            counts[steps, lane] = np.minimum(width, share.size - width * np.arange(per_epoch))
    shuffle_rows(rows, np.array(keys), np.array(epochs), threads)
    draws = tuple((walks[index][0], walks[index][1].key) for index in order)
    return Plan(tuple(order), tuple((counts > 0).sum(1).tolist()), rows, counts, draws)

"""Who is there in a round, and which minibatches each client walks through.

All of it is a pure function of (seed, run, round, client key, epoch): the order in which clients are listed
does not matter, and a replay meets the same minibatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedunfold.core import rng

SMALL = 64 * 1024
"""Bytes that go to a GPU's queue as they are. Of more the device would have to be waited for, unless they lie in memory
that it can reach by itself."""


def upload(values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device; numpy's memory is read before this returns, and what the device is at is not waited for."""
    held = torch.from_numpy(np.ascontiguousarray(values))
    held = held.to(dtype or held.dtype)
    if device.type == "cuda" and held.nbytes > SMALL:
        held = held.pin_memory()
    return held.to(device, non_blocking=True)


@dataclass(frozen=True)
class RoundRng:
    """The random decisions of one round."""

    seed: int
    run: str
    round: int

    def permutation(self, key: str, epoch: int, size: int) -> np.ndarray:
        """The order in which client `key` meets its samples in an epoch of this round."""
        return rng.permutation(size, self.philox_key(key, epoch))

    def philox_key(self, key: str, epoch: int) -> np.ndarray:
        """That of the stream which this order is drawn from."""
        return rng.philox_key(self.seed, "minibatches", self.run, self.round, key, epoch)

    def noise(self, key: str, step: int) -> int:
        """A seed for what a model draws itself in a step of client `key`, such as dropout."""
        return rng.integer(self.seed, "dropout", self.run, self.round, key, step)

    def present(
        self, keys: Sequence[str], participation_probability: Sequence[float], clients_per_round: int | None
    ) -> np.ndarray:
        """Client k is there with probability p_k, if it is among the `clients_per_round` ones (uniform, without
        replacement)."""
        there = np.array(
            [
                p >= 1 or rng.uniform(self.seed, "presence", self.run, self.round, key) < p
                for key, p in zip(keys, participation_probability, strict=True)
            ]
        )
        if clients_per_round is not None and clients_per_round < len(keys):
            tickets = [rng.uniform(self.seed, "sampling", self.run, self.round, key) for key in keys]
            chosen = np.zeros(len(keys), dtype=bool)
            chosen[np.argsort(tickets)[:clients_per_round]] = True
            there &= chosen
        return there


@dataclass(frozen=True)
class ClientSlice:
    """One client's part in a round: where its rows start, how many, and its epochs."""

    key: str
    start: int
    size: int
    epochs: int

    def steps(self, batch_size: int) -> int:
        """τ_k = E_k ⌈N_k/B⌉."""
        return self.epochs * -(-self.size // batch_size)


@dataclass(frozen=True)
class DeviceBatchPlan:
    """A `BatchPlan` with `rows` and `means[S, L, B]`, 1/|b| for real rows and 0 for padding, on a device."""

    order: tuple[int, ...]
    active: tuple[int, ...]
    rows: Tensor
    counts: np.ndarray
    draws: tuple[tuple[RoundRng, str], ...]
    means: Tensor

    def seeds(self, step: int) -> list[int]:
        """For what the models of the lanes that still train draw themselves in a step."""
        return [draw.noise(key, step) for draw, key in self.draws[: self.active[step]]]

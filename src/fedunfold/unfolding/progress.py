"""Where a learning stands, in memory and in a file that a later call goes on from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.errors import InputError
from fedunfold.files import write_atomically
from fedunfold.unfolding.adam import Adam
from fedunfold.unfolding.adjoint import weights_of


@dataclass(frozen=True)
class Progress:
    """What the next outer iteration needs, and what the ones before it brought.

    `roots[T, K+1]` are θ and, in the last column, σ (s = σ²), so that one Adam serves both; `losses` has an
    entry for every iteration done, `history` Θ before the first and after each, `set_aside[K]` counts in how many
    rounds of all of them a client was set aside.
    """

    roots: Tensor
    optimizer: Adam
    losses: tuple[float, ...] = ()
    history: tuple[Tensor, ...] = field(default=())
    set_aside: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @classmethod
    def start(cls, shares: Tensor, step_sizes: Sequence[float], betas: tuple[float, float]) -> "Progress":
        """θ = √(N_k/N) and σ = √s_t in every round."""
        sigma = torch.tensor(step_sizes, dtype=shares.dtype).sqrt()
        roots = torch.cat([shares.sqrt().repeat(len(sigma), 1), sigma[:, None]], 1)
        nobody = torch.zeros(len(shares), dtype=torch.long)
        return cls(roots, Adam.start(roots, betas), (), (weights_of(roots[:, :-1]),), nobody)

    def after(self, loss: float, gradient: Tensor, lr: float | Tensor) -> "Progress":
        """One Adam step further."""
        roots, optimizer = self.optimizer.step(self.roots, gradient, lr)
        history = (*self.history, weights_of(roots[:, :-1]))
        return Progress(roots, optimizer, (*self.losses, loss), history, self.set_aside)

    def with_set_aside(self, clients: Sequence[int]) -> "Progress":
        """The same, with these clients counted, as often as they are named."""
        return replace(
            self,
            set_aside=self.set_aside
            + torch.bincount(torch.tensor(clients, dtype=torch.long), minlength=len(self.set_aside)),
        )

    def save(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Write it, with what it belongs to."""
        tensors = {
            "roots": self.roots,
            "m": self.optimizer.m,
            "v": self.optimizer.v,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "history": torch.stack(self.history),
            "set_aside": self.set_aside,
        }
        content = serialize(tensors, {"fedunfold": json.dumps(identity, sort_keys=True)})
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: Path, identity: Mapping[str, Any], betas: tuple[float, float]) -> "Progress":
        """Read what `save` wrote for the same learning; that of another one is refused."""
        try:
            with safe_open(path, framework="pt") as file:
                belongs_to = json.loads((file.metadata() or {})["fedunfold"])
                names = ("roots", "m", "v", "losses", "history", "set_aside")
                tensors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InputError(f"checkpoint {path} is damaged; delete it to begin the learning again.") from error
        if belongs_to != json.loads(json.dumps(identity)):
            raise InputError(f"checkpoint {path} is of another learning; delete it, or choose another file.")
        losses = tuple(tensors["losses"].tolist())
        optimizer = Adam(tensors["m"], tensors["v"], len(losses), betas)
        return cls(tensors["roots"], optimizer, losses, tuple(tensors["history"]), tensors["set_aside"])

"""Where a learning stands, in memory and in a file that a later call goes on from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.errors import InputError
from fedunfold.files import write_atomically
from fedunfold.tensor_files import UNREADABLE, open_tensors
from fedunfold.unfolding.adam import Adam
from fedunfold.unfolding.adjoint import weights_of


@dataclass(frozen=True)
class Progress:
    """What the next outer iteration needs, and what the ones before it brought.

    `roots[T, K+1]` are θ and, in the last column, σ (s = σ²), so that one Adam serves both; `losses` has an
    entry for every iteration done, `history` Θ before the first and after each.
    """

    roots: Tensor
    optimizer: Adam
    losses: tuple[float, ...] = ()
    history: tuple[Tensor, ...] = field(default=())

    @classmethod
    def start(cls, shares: Tensor, step_sizes: Sequence[float], betas: tuple[float, float]) -> "Progress":
        """θ = √(N_k/N) and σ = √s_t in every round."""
        sigma = torch.tensor(step_sizes, dtype=shares.dtype).sqrt()
        roots = torch.cat([shares.sqrt().repeat(len(sigma), 1), sigma[:, None]], 1)
        return cls(roots, Adam.start(roots, betas), (), (weights_of(roots[:, :-1]),))

    def after(self, loss: float, gradient: Tensor, lr: float | Tensor) -> "Progress":
        """One Adam step further."""
        roots, optimizer = self.optimizer.step(self.roots, gradient, lr)
        return Progress(roots, optimizer, (*self.losses, loss), (*self.history, weights_of(roots[:, :-1])))

    def save(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Write it, with what it belongs to."""
        tensors = {
            "roots": self.roots,
            "m": self.optimizer.m,
            "v": self.optimizer.v,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "history": torch.stack(self.history),
        }
        content = serialize(tensors, {"fedunfold": json.dumps(identity, sort_keys=True)})
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: Path, identity: Mapping[str, Any], betas: tuple[float, float]) -> "Progress":
        """Read what `save` wrote for the same learning; that of another one is refused."""
        try:
            with open_tensors(path, "pt") as file:
                belongs_to = json.loads((file.metadata() or {})["fedunfold"])
                tensors = {name: file.get_tensor(name) for name in ("roots", "m", "v", "losses", "history")}
            _check(**tensors)
        except UNREADABLE as error:
            raise InputError(f"checkpoint {path} is damaged; delete it to begin the learning again.") from error
        if belongs_to != json.loads(json.dumps(identity)):
            raise InputError(f"checkpoint {path} is of another learning; delete it, or choose another file.")
        losses = tuple(tensors["losses"].tolist())
        optimizer = Adam(tensors["m"], tensors["v"], len(losses), betas)
        return cls(tensors["roots"], optimizer, losses, tuple(tensors["history"]))


def _check(roots: Tensor, m: Tensor, v: Tensor, losses: Tensor, history: Tensor) -> None:
    """ValueError where the tensors are not of one learning: [T, K+1] thrice, [M] and [M+1, T, K]."""
    rounds, columns = roots.shape
    shapes = [(rounds, columns), (rounds, columns), (len(losses),), (len(losses) + 1, rounds, columns - 1)]
    if [tuple(tensor.shape) for tensor in (m, v, losses, history)] != shapes:
        raise ValueError("its tensors are of different sizes")
    if not all(tensor.is_floating_point() for tensor in (roots, m, v, losses, history)):
        raise ValueError("its tensors are no floating-point numbers")

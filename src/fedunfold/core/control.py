"""Control variates: a vector of every client that outlives a round and corrects the client's steps.

    w ← w − η (∇ℓ_b(w) + v_k + μ (w − w^(t)))      with v_k [d] from s_k and s, constant within a round

s_k is client k's, 0 before the first round that it takes part in, and s the server's, the mean of all K:

    s_k⁺ = s_k + δ_k      s⁺ = s + (1/K) Σ_k δ_k      δ_k of those whose update entered the round, 0 of all others

δ_k is a function of s and Δ_k, so that the server keeps s from the updates alone. These means are plain ones, whatever
the weights Θ. What enters a round is its own updates: one that is remembered of an absent client changes nothing here.
For the adjoint s and s_k are constants.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LocalOptimizer, State


@dataclass(frozen=True)
class Control:
    """The control variates before a round.

    Attributes:
        shared: s, [d].
        own: s_k by the client's index, of those that have taken part; empty where clients keep theirs themselves.
        rounds: The last round that each client's update entered, by its index: which s_k it begins from.
    """

    shared: Tensor
    own: Mapping[int, Tensor] = field(default_factory=dict)
    rounds: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Tensor) -> "Control":
        """Before the first round."""
        return cls(torch.zeros_like(model))

    def rows(self, clients: Iterable[int]) -> Tensor:
        """s_k of some clients, [n, d]."""
        known = list(clients)
        found = self.shared.new_zeros(len(known), len(self.shared))
        for row, k in enumerate(known):
            if k in self.own:
                found[row] = self.own[k]
        return found

    def to_tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        rounds = torch.tensor([list(self.rounds), list(self.rounds.values())], dtype=torch.long)
        own = {f"control-{k}": row for k, row in self.own.items()}
        return {"control": self.shared, "control_rounds": rounds} | own

    @classmethod
    def from_tensors(cls, found: Mapping[str, Tensor]) -> "Control":
        """What `to_tensors` gave; ValueError or KeyError where it did not."""
        own = {int(name.removeprefix("control-")): row for name, row in found.items() if name.startswith("control-")}
        clients, rounds = found["control_rounds"].tolist()
        return cls(found["control"], dict(sorted(own.items())), dict(zip(clients, rounds, strict=True)))


@dataclass(frozen=True)
class ControlledOptimizer(LocalOptimizer):
    """A local optimiser with control variates. Its state within a round is v_k, which its steps leave as it is."""

    reads_shared: ClassVar[bool] = True
    """Whether a client needs s, which is then sent to it beside the model."""

    @abstractmethod
    def correction(self, own: Tensor, shared: Tensor) -> Tensor:
        """v_k [n, d] from s_k [n, d] and s [d]."""

    @abstractmethod
    def change(self, shared: Tensor, updates: Tensor, num_steps: Tensor, lr: float) -> Tensor:
        """δ_k = s_k⁺ − s_k [n, d] from s [d], Δ_k [n, d], τ_k [n] and η."""

    def corrected_model(self, model: Tensor, shared: Tensor) -> Tensor:
        """w^(t+1) from what the server's optimiser made of a round that updates entered, and s⁺."""
        return model

    @property
    def uses_gradients_only(self) -> bool:
        return True

    def init(self, params: Tensor) -> State:
        """v_k = 0, which training under control variates puts another v_k in the place of."""
        return (torch.zeros_like(params),)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        raise InputError(f"{self.name}: its updates are no weighted sums of gradients; choose sgd, prox or momentum.")

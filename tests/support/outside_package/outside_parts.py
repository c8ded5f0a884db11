"""A package of somebody else: one part of every kind, found by its entry points."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

import fedunfold as fu
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import (
    Aggregator,
    ClientSampler,
    KnownClients,
    LocalOptimizer,
    OuterLoss,
    RoundInfo,
    ServerOptimizer,
    State,
)
from fedunfold.core.task import Task
from fedunfold.rules import Rule


def power_of_size(power: float = 0.5) -> Rule:
    """Θ_k ∝ N_k^power."""

    def weigh(updates: fu.ClientUpdates, state: object) -> tuple[Tensor, object]:
        scores = updates.num_examples.double() ** power
        return scores / scores.sum(), state

    return Rule(f"power-of-size({power:g})", weigh)


@dataclass(frozen=True)
class Lookahead(ServerOptimizer):
    """m ← β m + u,  w ← w + u + β m."""

    name: ClassVar[str] = "lookahead"
    beta: float = 0.5

    def init(self, model: Tensor) -> State:
        return (torch.zeros_like(model),)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        m = self.beta * state[0] + direction
        return model + direction + self.beta * m, (m,)


@dataclass(frozen=True)
class Nesterov(LocalOptimizer):
    """v ← ρ v + ∇ℓ,  w ← w − η (∇ℓ + ρ v)."""

    name: ClassVar[str] = "nesterov"
    rho: float = 0.5

    @property
    def uses_gradients_only(self) -> bool:
        return True

    def init(self, params: Tensor) -> State:
        return (torch.zeros_like(params),)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        velocity = self.rho * state[0] + gradient
        return params - lr * (gradient + self.rho * velocity), (velocity,)


@dataclass(frozen=True)
class RMSprop(LocalOptimizer):
    """RMSprop with momentum and weight decay: two moments for every client."""

    name: ClassVar[str] = "rmsprop"
    decay: float = 0.1

    def init(self, params: Tensor) -> State:
        return torch.zeros_like(params), torch.full_like(params, 0.01)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        m, v = 0.9 * state[0] + 0.1 * gradient, 0.99 * state[1] + 0.01 * gradient.square()
        return params - lr * (m / (v.sqrt() + 0.1) + self.decay * params), (m, v)


@dataclass(frozen=True)
class ClippedMean(Aggregator):
    """Σ_k α_k m_k with every update clipped to a norm."""

    name: ClassVar[str] = "clipped-mean"
    norm: float = 1.0

    def combine(self, updates: Tensor, coefficients: Tensor, layout: ParamLayout) -> Tensor:
        norms = updates.norm(dim=1, keepdim=True).clamp(min=self.norm)
        clipped = updates * (self.norm / norms)
        return torch.einsum("k,kd->d", coefficients.to(updates), clipped)


@dataclass(frozen=True)
class Margin(OuterLoss):
    """max(0, 1 − (z_y − max_{c≠y} z_c))², on the way and at the end."""

    name: ClassVar[str] = "margin"

    def losses(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        own = outputs.gather(-1, targets.unsqueeze(-1))
        others = outputs.scatter(-1, targets.unsqueeze(-1), -torch.inf).amax(-1, keepdim=True)
        return (1 - own + others).clamp(min=0).square().squeeze(-1)


@dataclass(frozen=True)
class Largest(ClientSampler):
    """The clients with the most data."""

    name: ClassVar[str] = "largest"

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        return np.argsort(-known.num_examples)[:count]

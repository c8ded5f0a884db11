"""What local training on any backend offers, and what it is given beside the minibatches.

A *client slot* is one client's copy of the model in a batched computation; [L] runs over slots, [S] over steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedunfold.core.participation import RoundRng
from fedunfold.core.parts import LocalOptimizer, OuterLoss
from fedunfold.core.task import Task
from fedunfold.engines.simulation.kernels.base import Kernel


@dataclass(frozen=True)
class DeviceBatchPlan:
    """Minibatches of several clients on a device, each client in a slot of its own, those with more steps first.

    Attributes:
        order: The client in each slot.
        active: How many slots, the first ones, still train at each step.
        rows: Rows of the data, [S, L, B].
        counts: How many of them are real, [S, L], on the host.
        means: 1/|b| for real rows and 0 for padding, [S, L, B].
        clients: Each slot's randomness and client.
    """

    order: tuple[int, ...]
    active: tuple[int, ...]
    rows: Tensor
    counts: np.ndarray
    means: Tensor
    clients: Sequence[tuple[RoundRng, str]] = ()

    def seeds(self, step: int) -> list[int]:
        """For what the models of the slots that still train draw themselves in a step."""
        return [rng.noise_seed(client_id, step) for rng, client_id in self.clients[: self.active[step]]]


@dataclass(frozen=True)
class OuterWeights:
    """How each slot's minibatches enter the outer loss.

    Attributes:
        loss: The outer loss.
        factors: A factor for every client, [L].
        class_weights: A weight for every class, [C]; None where all count alike.
    """

    loss: OuterLoss
    factors: Tensor
    class_weights: Tensor | None

    def coefficients(self, task: Task, targets: Tensor, means: Tensor) -> Tensor:
        """What every sample's loss is multiplied with, [..., L, B]; `means` is 1/|b|, 0 for padding."""
        weights = means * self.factors[: means.shape[-2], None]
        return weights if self.class_weights is None else weights * self.class_weights[task.groups(targets)]


@dataclass
class StepSums:
    """What local training sums up, per slot.

    Attributes:
        losses: The training and the outer losses, [2, L].
        gradients: Training gradients, [L, d], added to where they are given.
        outer_gradients: Outer gradients, [L, d], added to where they are given.
    """

    losses: Tensor
    gradients: Tensor | None = None
    outer_gradients: Tensor | None = None


@dataclass(frozen=True)
class LocalTrainer(ABC):
    """Local training of a round's clients, forward and backward.

    Attributes:
        uses_torch_threads: Whether its steps are torch's; compiled code has threads of its own.
        kernel: Gradients and curvature of the model.
        y: Targets of all clients' rows.
        batches: The minibatches of every client slot.
        step_sizes: η_k of every slot, [L].
        optimizer: The clients' optimiser.
        outer: How minibatches enter the outer loss; None where they do not.
    """

    uses_torch_threads: ClassVar[bool] = False

    kernel: Kernel
    y: Tensor
    batches: DeviceBatchPlan
    step_sizes: Tensor
    optimizer: LocalOptimizer
    outer: OuterWeights | None

    @property
    def path_outer(self) -> OuterWeights | None:
        """How minibatches enter the outer loss, where local steps are part of it."""
        return None if self.outer is None or self.outer.loss.only_final else self.outer

    @abstractmethod
    def forward(self, start: Tensor, sums: StepSums) -> Tensor:
        """Train every slot.

        Args:
            start: w^(t) of every slot [L, d].
            sums: Filled with losses; gradients are added where it has a place for them.

        Returns:
            w_k of every slot [L, d].
        """

    @abstractmethod
    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """Differentiate through the local training of every slot, which is repeated for it.

        Args:
            start: w^(t) of every slot [L, d].
            adjoint: dL/dw_k of every slot [L, d].

        Returns:
            dL/dw^(t) through every slot [L, d].
        """

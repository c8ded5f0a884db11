"""What the engine needs of a model: gradients and curvature of many copies of it at once.

A *client slot* is one copy, with its own parameters and its own minibatch. Parameters of all slots are held as one
tensor for each parameter of the model, the slot on the leading axis. Minibatches are padded to one size;
`counts` says how many leading rows of each slot are real, and coefficients of padded rows are 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedunfold.core.params import ParamLayout
from fedunfold.core.task import Task
from fedunfold.data.arrays import Inputs

Parameters = list[Tensor]
Pullback = Callable[[Tensor, Parameters], None]
OuterSlope = Callable[[Tensor], Tensor] | None
"""From outputs to the slopes of the outer loss in them; None where there is no outer loss."""


@dataclass(frozen=True)
class Batch:
    """One minibatch for every slot: x [L, B, …], y [L, B, …]; rows from counts[l] on are padding.

    In training every slot has a seed for what the model draws itself; without seeds the model only reads.
    """

    x: Inputs
    y: Tensor
    counts: Sequence[int]
    seeds: Sequence[int] | None = None


class Kernel(Protocol):
    """Gradients and Hessian-vector products of many slots of one model.

    Lists of parameters may continue after those of `layout.shapes` with buffers, of shapes `layout.buffer_shapes`:
    training moves them in `local_vjp`, and they have no gradient.

    Attributes:
        task: What it is trained for.
        layout: What is trained.
        is_stochastic: Whether training needs seeds.
        min_batch_size: How small its minibatches may be.
    """

    task: Task
    layout: ParamLayout
    is_stochastic: bool
    min_batch_size: int

    def outputs(self, parameters: Parameters, batch: Batch) -> Tensor:
        """The model's outputs [L, B, …] alone."""

    def local_vjp(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Pullback]:
        """Outputs z [L, B, …], and a function (δ, into) that adds Σ_i δ_iᵀ ∂z_i/∂w to `into`.

        `into` may be the parameters themselves: an update in place, after which the function is spent.
        """

    def apply_hvp_(
        self, parameters: Parameters, adjoint: Parameters, batch: Batch, curvature: Tensor, outer_slope: OuterSlope
    ) -> None:
        """In place: p ← p − (Σ_i u_i ∇²ℓ_i(w)) p + Σ_i ε_iᵀ ∂z_i/∂w.

        u [L, B] is `curvature`; ε [L, B, …] is `outer_slope(outputs)`, nothing where that is None.
        """


def flatten(parameters: Parameters) -> Tensor:
    """Slots of parameters as rows of a matrix [L, d]."""
    return torch.cat([p.flatten(1) for p in parameters], 1)


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> Parameters:
    """The inverse: slots of parameters where they lie in the matrix."""
    pieces = torch.split(flat, [shape.numel() for shape in shapes], 1)
    return [piece.view(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> Parameters:
    """The inverse: contiguous copies that may be changed in place."""
    return [p.clone(memory_format=torch.contiguous_format) for p in views(flat, shapes)]

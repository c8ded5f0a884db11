"""What the engine asks of a model: gradients and curvature of many copies of it at once.

A *lane* is one copy, with its own parameters and its own minibatch. Parameters of all lanes are held as one
tensor for each parameter of the model, the lane on the leading axis. Minibatches are padded to one size;
`counts` says how many leading rows of each lane are real, and coefficients of padded rows are 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedunfold.errors import InputError

Parameters = list[Tensor]
Pullback = Callable[[Tensor, Parameters], None]


@dataclass(frozen=True)
class Batch:
    """One minibatch for every lane: x [L, B, …], y [L, B]; rows from counts[l] on are padding."""

    x: Tensor
    y: Tensor
    counts: Sequence[int]


class Kernel(Protocol):
    """Gradients and Hessian-vector products of many lanes of one model."""

    shapes: tuple[torch.Size, ...]

    def linearize(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Pullback]:
        """Logits [L, B, C], and a function (δ, into) that adds Σ_i δ_iᵀ ∂z_i/∂w to `into`.

        `into` may be the parameters themselves: an update in place, after which the function is spent.
        """
        ...

    def pull_adjoint_(
        self,
        parameters: Parameters,
        adjoint: Parameters,
        batch: Batch,
        curvature: Tensor,
        outer_slope: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """In place: p ← p − (Σ_i u_i ∇²ce_i(w)) p + Σ_i ε_iᵀ ∂z_i/∂w.

        u [L, B] is `curvature`; ε [L, B, C] is `outer_slope(logits)`, nothing where that is None.
        """
        ...


def flatten(parameters: Parameters) -> Tensor:
    """Lanes of parameters as rows of a matrix [L, d]."""
    return torch.cat([p.flatten(1) for p in parameters], 1)


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> Parameters:
    """The inverse: contiguous copies that may be changed in place."""
    pieces = torch.split(flat, [shape.numel() for shape in shapes], 1)
    return [
        piece.reshape(-1, *shape).clone(memory_format=torch.contiguous_format)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def check_trainable(module: nn.Module) -> None:
    """Refuse what a stateless, deterministic replay of a client cannot carry."""
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameters to train.")
    for name, layer in module.named_modules():
        where = f"layer '{name}' ({type(layer).__name__})"
        has_state = next(layer.buffers(recurse=False), None) is not None
        if has_state or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise InputError(f"{where} keeps or uses statistics of a minibatch; use GroupNorm or LayerNorm.")
        dropout = getattr(layer, "p", 0) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            dropout = layer.dropout
        if dropout > 0 or isinstance(layer, nn.RReLU):
            raise InputError(f"{where} draws at random in every step; turn its dropout off or remove it.")

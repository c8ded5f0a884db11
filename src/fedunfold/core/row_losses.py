"""Losses of the rows of minibatches, and the slopes of any weighted sum of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Slopes = Callable[[Tensor], Tensor]
"""From weights c_i [L, B] to Σ_j c_j ∂ℓ_j/∂outputs_i, [L, B, …]."""


def row_losses(
    losses: Callable[[Tensor, Tensor], Tensor],
    outputs: Tensor,
    targets: Tensor,
    counts: Sequence[int],
    *,
    rows_interact: bool,
) -> tuple[Tensor, Slopes]:
    """ℓ_i of all rows of several minibatches, and their slopes by autograd over the outputs alone.

    Args:
        losses: From outputs and targets of one minibatch to ℓ_i, [B].
        outputs: Of every minibatch, [L, B, …].
        targets: [L, B, …].
        counts: How many leading rows of each minibatch are real.
        rows_interact: Whether a row's loss depends on the others of its minibatch.

    Returns:
        ℓ_i [L, B], and the slopes of their sum with weights.
    """
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        if rows_interact:
            width = outputs.shape[1]
            parts = [losses(leaf[slot, :count], targets[slot, :count]) for slot, count in enumerate(counts)]
            found = torch.stack([torch.cat([part, part.new_zeros(width - len(part))]) for part in parts])
        else:
            found = losses(leaf.flatten(0, 1), targets.flatten(0, 1)).view(outputs.shape[:2])
    return found.detach(), lambda weights: torch.autograd.grad(found, leaf, weights, retain_graph=True)[0]

"""The cross-entropy and the squared error of logits, with their derivatives worked out."""

import torch
from torch import Tensor


def cross_entropy_values(logits: Tensor, labels: Tensor) -> Tensor:
    """ce alone."""
    return -torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """ce = −log softmax(z)_y and ∂ce/∂z = softmax(z) − e_y, for logits [..., C] and labels [...]."""
    log_probabilities = torch.log_softmax(logits, -1)
    chosen = labels.unsqueeze(-1)
    losses = -log_probabilities.gather(-1, chosen).squeeze(-1)
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(-1, chosen, logits.new_full((), -1).expand_as(chosen))
    return losses, gradient


def squared_error(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """mean_c (softmax(z)_c − [c = y])² and its gradient (2/C)(diag(s) − s sᵀ)(s − e_y)."""
    probabilities = torch.softmax(logits, -1)
    error = probabilities.clone()
    chosen = labels.unsqueeze(-1)
    error.scatter_add_(-1, chosen, -torch.ones_like(chosen, dtype=logits.dtype))
    gradient = softmax_jacobian_product(probabilities, error).mul_(2 / logits.shape[-1])
    return error.square().mean(-1), gradient


def softmax_jacobian_product(probabilities: Tensor, vector: Tensor) -> Tensor:
    """(diag(s) − s sᵀ) v: also the Hessian of the cross-entropy in the logits, applied to v."""
    weighted = probabilities * vector
    return weighted - probabilities * weighted.sum(-1, keepdim=True)

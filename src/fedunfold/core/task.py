"""The local training loss, the outer losses, and their derivatives with respect to the logits.

Local training minimises the mean cross-entropy of a minibatch. The outer loss is what the aggregation
weights are learned for; client k adds, over its minibatches b (`E_k` epochs of them) in every layer t:

| name           | one minibatch                                 | client factor | layers |
|----------------|-----------------------------------------------|---------------|--------|
| path           | mean cross-entropy                            | 1             | 0 … T  |
| sample         | mean cross-entropy                            | 1/E_k         | 0 … T  |
| balanced       | Σ_i (N/(C n_{y_i})) ce_i / |b|                | 1/E_k         | 0 … T  |
| final          | as sample                                     | 1/E_k         | T      |
| final-balanced | as balanced                                   | 1/E_k         | T      |
| mse            | mean squared error of softmax against one-hot | 1             | 0 … T  |

"path" is the published code's. It counts a client E_k times, so with unequal epochs it favours clients that
train longer; "sample" counts every training sample the same. "balanced" is the class-balanced objective that
a class-balanced test measures; it needs only the federation's label counts n_y. "mse" is the paper's text.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedunfold.core.errors import InputError

OuterName = Literal["path", "sample", "balanced", "final", "final-balanced", "mse"]


@dataclass(frozen=True)
class OuterLoss:
    """A row of the table above, taken apart into what an engine asks of it."""

    name: OuterName = "path"

    def __post_init__(self) -> None:
        if self.name not in get_args(OuterName):
            raise InputError(f"unknown outer loss '{self.name}'; choose one of {', '.join(get_args(OuterName))}.")

    @property
    def only_last_layer(self) -> bool:
        return self.name.startswith("final")

    @property
    def per_epoch(self) -> bool:
        """Whether client k's terms are divided by its epochs E_k."""
        return self.name not in ("path", "mse")

    @property
    def balances_classes(self) -> bool:
        return self.name.endswith("balanced")

    @property
    def is_training_gradient(self) -> bool:
        """Whether Σ_τ ∇ℓ^out is a multiple of the sum of training gradients, which w_k already carries."""
        return self.name in ("path", "sample")

    @property
    def is_cross_entropy(self) -> bool:
        """Whether a sample's outer loss is its training loss, times a coefficient."""
        return self.name != "mse"

    def class_weights(self, label_counts: Tensor) -> Tensor | None:
        """N/(C n_y) from label counts [K, C] of the federation; 0 for a class nobody holds."""
        if not self.balances_classes:
            return None
        counts = label_counts.sum(0).double()
        return torch.where(counts > 0, counts.sum() / (len(counts) * counts.clamp(min=1)), 0.0)

    def values(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of every sample and its gradient with respect to the logits."""
        return (cross_entropy if self.is_cross_entropy else squared_error)(logits, labels)


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

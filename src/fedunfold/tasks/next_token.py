"""The next token of a sequence."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks.classification import class_numbers
from fedunfold.tasks.cross_entropy import cross_entropy_values

IGNORED = -100
"""A target that does not count, as in torch's cross-entropy."""


@TASKS.register("next_token")
@dataclass(frozen=True)
class NextToken(Task):
    """The next token of a sequence: ℓ is the mean cross-entropy of its tokens, for logits [B, S, V] and targets [B, S].

    A target of −100 does not count. Inputs that are whole numbers stay so. Metrics: perplexity, exp of the mean
    cross-entropy over all tokens, and the accuracy of the most likely token.

    Attributes:
        vocabulary: V.

    >>> task = NextToken(4)
    >>> found = task.metrics(task.statistics(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]])))
    >>> round(found["perplexity"], 6)
    4.0
    """

    name: ClassVar[str] = "next_token"
    primary: ClassVar[str] = "perplexity"
    greater_is_better: ClassVar[bool] = False
    percentages: ClassVar[frozenset[str]] = frozenset({"accuracy"})
    keeps_integers: ClassVar[bool] = True
    vocabulary: int

    def __post_init__(self) -> None:
        if not (isinstance(self.vocabulary, int) and self.vocabulary >= 2):
            raise InputError(f"a vocabulary has 2 tokens or more, not {self.vocabulary}.")

    @property
    def num_outputs(self) -> int:
        return self.vocabulary

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        tokens = self.check_minibatch(targets, name)
        if not (tokens != IGNORED).any():
            raise InputError(f"{name} has no token that counts, only {IGNORED}; give at least one.")
        return tokens

    def check_minibatch(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.ndim != 2:
            raise InputError(f"{name} has shape {targets.shape}; give the next token everywhere, [rows, length].")
        return class_numbers(targets, name, self.vocabulary, IGNORED)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return *targets.shape, self.vocabulary

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values, counts = self._values(outputs, targets)
        return values.sum(-1) / counts.sum(-1).clamp(min=1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values, counts = self._values(outputs.double(), targets)
        right = (outputs.argmax(-1) == targets) & counts
        return torch.stack([values.sum(), counts.sum().double(), right.sum().double()])

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        total, count, right = statistics
        return {"perplexity": float((total / count).exp()), "accuracy": float(right / count)}

    def _values(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != IGNORED
        return cross_entropy_values(outputs, targets.clamp(min=0)) * counts, counts

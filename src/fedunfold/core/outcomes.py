"""What comes of training: the outer loss at the end, the test of a model, and updates that were not used."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedunfold.core.task import ACCURACY, PrimaryMetric


@dataclass(frozen=True)
class OuterLossResult:
    """The outer loss of the final evaluation, t = T.

    Attributes:
        loss: Σ_k Σ_b ℓ^out_b(w^(T)).
        gradient: Its gradient in w^(T), [d].
    """

    loss: float
    gradient: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Test result of one model.

    Attributes:
        score: The task's primary metric.
        loss: The mean loss of a sample.
        class_accuracy: Accuracy on each class, [C]; NaN for a class without test samples, empty without classes.
        metrics: All of the task's metrics by name.
        primary: Which of them is the score.
    """

    score: float
    loss: float
    class_accuracy: Tensor = field(default_factory=lambda: torch.empty(0))
    metrics: Mapping[str, float] = field(default_factory=dict)
    primary: PrimaryMetric = ACCURACY


@dataclass(frozen=True)
class RejectedUpdate:
    """A client whose contribution to a round was not used, and why.

    Attributes:
        round: t, from 0.
        client: Its id.
        reason: What is wrong, as the end of a sentence that begins with "it".

    >>> RejectedUpdate(round=3, client="hospital-b", reason="has a NaN").client
    'hospital-b'
    """

    round: int
    client: str
    reason: str

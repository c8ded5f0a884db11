"""A class for every pixel."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks.classification import class_numbers


@TASKS.register("segmentation")
@dataclass(frozen=True)
class Segmentation(Task):
    """A class for every pixel: ℓ = mean over pixels of the cross-entropy + 1 − the mean over classes of the soft Dice.

        dice_c = (2 Σ_p s_pc y_pc + 1) / (Σ_p s_pc + Σ_p y_pc + 1),   s = softmax(z)

    for logits [B, C, …] and masks of class numbers [B, …], pixels p of one image. Class 0 is the background. Metrics:
    IoU and Dice of whole data sets, the means over the classes that occur, and the accuracy of pixels.

    Attributes:
        classes: C, the background included.

    >>> task = Segmentation(2)
    >>> mask = torch.tensor([[[0, 1], [1, 1]]])
    >>> logits = torch.stack([1.0 - mask, torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])], 1)
    >>> {name: round(value, 3) for name, value in task.metrics(task.statistics(logits, mask)).items()}
    {'iou': 0.583, 'dice': 0.733, 'accuracy': 0.75}
    """

    name: ClassVar[str] = "segmentation"
    primary: ClassVar[str] = "iou"
    percentages: ClassVar[frozenset[str]] = frozenset({"iou", "dice", "accuracy"})
    classes: int = 2

    def __post_init__(self) -> None:
        if not (isinstance(self.classes, int) and self.classes >= 2):
            raise InputError(f"a segmentation has 2 classes or more, the background included, not {self.classes}.")

    @property
    def num_outputs(self) -> int:
        return self.classes

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        masks = self.check_minibatch(targets, name)
        if not masks.any():
            raise InputError(f"{name} has no pixel of another class than 0, the background; give masks with some.")
        return masks

    def check_minibatch(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.ndim < 2:
            raise InputError(f"{name} has shape {targets.shape}; give a mask of class numbers for every image.")
        return class_numbers(targets, name, self.classes)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), self.classes, *targets.shape[1:]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_shares = torch.log_softmax(outputs, 1).flatten(2)
        wanted = self._one_hot(targets).to(log_shares)
        shares = log_shares.exp()
        dice = (2 * (shares * wanted).sum(2) + 1) / (shares.sum(2) + wanted.sum(2) + 1)
        return 1 - (log_shares * wanted).sum(1).mean(1) - dice.mean(1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, wanted = self._one_hot(outputs.argmax(1)), self._one_hot(targets)
        counts = (predicted & wanted, predicted, wanted)
        return torch.stack([found.sum((0, 2)) for found in counts]).double().flatten()

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        both, predicted, wanted = statistics.view(3, self.classes)
        either = predicted + wanted - both
        occurs = either > 0
        return {
            "iou": float((both / either)[occurs].mean()),
            "dice": float((2 * both / (predicted + wanted))[occurs].mean()),
            "accuracy": float(both.sum() / wanted.sum()),
        }

    def _one_hot(self, masks: Tensor) -> Tensor:
        """[B, C, pixels]."""
        numbers = torch.arange(self.classes, device=masks.device)
        return masks.flatten(1).unsqueeze(1) == numbers[:, None]

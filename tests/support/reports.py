"""Round reports for tests, with only the fields a weighting rule looks at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedunfold.core.federation import ClientUpdates


def report(
    sizes: Sequence[int],
    *,
    round: int = 0,
    keys: Sequence[str] | None = None,
    present: Sequence[bool] | None = None,
    loss: Sequence[float] | None = None,
    start_loss: Sequence[float] | None = None,
    accuracy: Sequence[float] | None = None,
    gradients: Sequence[Sequence[float]] | Tensor | None = None,
) -> ClientUpdates:
    """All clients present unless said otherwise, named a, b, c, …; `gradients` has rows for present ones."""
    here = torch.tensor([True] * len(sizes) if present is None else list(present))
    vectors = None if gradients is None else torch.as_tensor(gradients)
    return ClientUpdates(
        round=round,
        keys=tuple(keys or "abcdefgh"[: len(sizes)]),
        sizes=torch.tensor(sizes),
        present=here,
        steps=here.long(),
        updates=torch.zeros(int(here.sum()), 2),
        loss=None if loss is None else torch.tensor(loss),
        start_loss=None if start_loss is None else torch.tensor(start_loss),
        accuracy=None if accuracy is None else torch.tensor(accuracy),
        gradients=vectors,
    )

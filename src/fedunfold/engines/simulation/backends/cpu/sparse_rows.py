"""The data as compiled code reads them: without their background, where there is much of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_NONZERO = 1 / 3
"""Of all entries, how many may differ from the background for it to be left out."""
MIN_EQUAL = 0.1
"""Of a column, how many must be its lowest for that to be background: an outlier is not, and would drown the others."""


@dataclass(frozen=True)
class SparseRows:
    """Rows x_i + c of which x_i is mostly 0.

    Images and tables with one column for each category are mostly background, a value that a column has nearly
    everywhere and that is its lowest; scaled or not, only products with what differs from it are computed. Dense data
    have neither `nonzero` nor a background, and are not copied.

    Attributes:
        values: x_i [N, features].
        nonzero: A bit for every entry of x_i that is not 0, in words of 64 features; None for dense data.
        background: c [features]; None where it is 0.
        overlaps: x_i · c [N]; None where c is 0.
    """

    values: Tensor
    nonzero: np.ndarray | None = None
    background: Tensor | None = None
    overlaps: Tensor | None = None

    @classmethod
    def from_dense(cls, x: Tensor) -> "SparseRows":
        """Split rows into background and the rest, if enough of them is background.

        Args:
            x: The data [N, …], flattened to [N, features].
        """
        flat = x.flatten(1)
        lowest = flat.amin(0)
        background = torch.where((flat == lowest).sum(0) >= MIN_EQUAL * len(flat), lowest, 0)
        differs = (flat != background).numpy()
        if differs.mean() > MAX_NONZERO:
            return cls(flat)
        to_words = -differs.shape[1] % 64
        nonzero = np.packbits(np.pad(differs, ((0, 0), (0, to_words))), axis=1, bitorder="little")
        if not background.any():
            return cls(flat, nonzero)
        values = flat - background
        return cls(values, nonzero, background, torch.mv(values, background))

"""The data as the compiled walk reads them: without their background, where there is much of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST_MARKED = 1 / 3
"""Of all numbers, how many may differ from the background for it to be left out."""
LEAST_ALIKE = 0.1
"""Of a column, how many must be its lowest for that to be background: an outlier is not, and would drown the others."""


@dataclass(frozen=True)
class Rows:
    """Rows x_i + c: `values` are x_i, and `marks` has a bit for every entry of them that is not 0.

    Images and tables with one column for each category are mostly background, a value that a column has nearly
    everywhere and that is its lowest; scaled or not, products need only be made of what differs from it. Data that are
    not so have neither marks nor a background, and are not copied.
    """

    values: Tensor
    marks: np.ndarray | None = None
    background: Tensor | None = None
    overlaps: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> "Rows":
        flat = x.flatten(1)
        lowest = flat.amin(0)
        background = torch.where((flat == lowest).sum(0) >= LEAST_ALIKE * len(flat), lowest, 0)
        marked = (flat != background).numpy()
        if marked.mean() > MOST_MARKED:
            return cls(flat)
        to_words = -marked.shape[1] % 64
        marks = np.packbits(np.pad(marked, ((0, 0), (0, to_words))), axis=1, bitorder="little")
        if not background.any():
            return cls(flat, marks)
        values = flat - background
        return cls(values, marks, background, torch.mv(values, background))

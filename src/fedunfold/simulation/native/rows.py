"""The data as the compiled walk reads them: without their background, where there is much of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST_MARKED = 1 / 3
"""Of all entries, how many may differ from the background for it to be left out."""


@dataclass(frozen=True)
class Rows:
    """Rows x_i + c: `values` are x_i, and `marks` has a bit for every entry of them that is not 0.

    Images and tables with one column for each category are mostly background, a value that a column has nearly
    everywhere and that is its lowest; scaled or not, products need only be made of what differs from it. Data that are
    not so have neither marks nor a background.
    """

    values: Tensor
    marks: np.ndarray | None = None
    background: Tensor | None = None
    overlaps: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> "Rows":
        flat = x.flatten(1)
        background = flat.amin(0)
        marked = (flat != background).numpy()
        if marked.mean() > MOST_MARKED:
            return cls(flat)
        to_words = -marked.shape[1] % 64
        marks = np.packbits(np.pad(marked, ((0, 0), (0, to_words))), axis=1, bitorder="little")
        if not background.any():
            return cls(flat, marks)
        values = flat - background
        return cls(values, marks, background, torch.mv(values, background))

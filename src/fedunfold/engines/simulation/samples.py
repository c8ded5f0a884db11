"""Samples where they are computed on: all of them in memory, or read minibatch by minibatch."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.inputs import Inputs, cast, map_inputs, take, tensors
from fedunfold.data.datasets import DatasetRows

READ_AT_ONCE = 1024
"""Rows of a data set in memory at a time where all of them are read."""


@dataclass(frozen=True, eq=False)
class MemorySamples:
    """All rows on the device.

    Attributes:
        inputs: The rows.
        y: Their targets.
    """

    inputs: Inputs
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def expect(self, rows: Tensor, counts: np.ndarray) -> None:
        """Nothing has to be read ahead."""

    def minibatches(self, rows: Tensor, counts: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Rows [L, B], of which the first `counts` of each minibatch are real.

        All calls read into the same memory: the rows of one are gone when the next is made.
        """
        flat = rows.flatten()
        buffer = self._buffer(len(flat))
        for held, read in zip(tensors(self.inputs), tensors(buffer), strict=True):
            torch.index_select(held, 0, flat, out=read[: len(flat)])  # several times faster than indexing
        return map_inputs(lambda t: t[: len(flat)].view(*rows.shape, *t.shape[1:]), buffer), self.y[rows]

    def pieces(self, rows: np.ndarray | None, at_once: int) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """Ascending rows, or all, some after the other; a slice, which copies nothing, where none is left out."""
        index: Tensor | slice = slice(None)
        if rows is not None and len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            index = slice(int(rows[0]), int(rows[-1]) + 1)
        elif rows is not None:
            index = torch.from_numpy(rows).to(self.y.device)
        inputs, y = take(self.inputs, index), self.y[index]
        for begin in range(0, len(y), at_once):
            piece = slice(begin, min(begin + at_once, len(y)))
            yield piece, take(inputs, piece), y[piece]

    def _buffer(self, rows: int) -> Inputs:
        held = self._held.get("rows")
        if held is None or len(tensors(held)[0]) < rows:
            held = self._held["rows"] = map_inputs(lambda t: t.new_empty(rows, *t.shape[1:]), self.inputs)
        return held

    @cached_property
    def _held(self) -> dict[str, Inputs]:
        return {}


@dataclass(frozen=True, eq=False)
class DatasetSamples:
    """Rows that are read from data sets when they are needed, ahead of time where the order is known.

    Attributes:
        rows: The data sets.
        device: Where they are computed on.
        dtype: In which precision.
    """

    rows: DatasetRows
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def y(self) -> Tensor:
        """No targets: they come with the rows."""
        return torch.empty(0)

    def expect(self, rows: Tensor, counts: np.ndarray) -> None:
        """The minibatches [S, L, B] will be wanted in this order: workers read them ahead."""
        wanted = [_real(batch, own) for batch, own in zip(rows.cpu().numpy(), counts, strict=True)]
        self._ahead[:] = [(deque(wanted), self.rows.stream(wanted))]

    def minibatches(self, rows: Tensor, counts: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Rows [L, B], of which the first `counts` of each minibatch are real; others are 0."""
        real = _real(rows.cpu().numpy(), counts)
        x, y = self._next(real)
        places = torch.tensor([slot * rows.shape[1] + i for slot, count in enumerate(counts) for i in range(count)])

        def spread(part: Tensor) -> Tensor:
            out = part.new_zeros(rows.numel(), *part.shape[1:])
            out[places] = part
            return out.view(*rows.shape, *part.shape[1:])

        return cast(map_inputs(spread, x), self.device, self.dtype), spread(y).to(self.device)

    def pieces(self, rows: np.ndarray | None, at_once: int) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """Ascending rows, or all, some after the other."""
        rows = np.arange(len(self.rows)) if rows is None else rows
        at_once = min(at_once, READ_AT_ONCE)
        batches = [rows[begin : begin + at_once] for begin in range(0, len(rows), at_once)]
        for i, (x, y) in enumerate(self.rows.stream(batches)):
            piece = slice(i * at_once, i * at_once + len(y))
            yield piece, cast(x, self.device, self.dtype), y.to(self.device)

    def _next(self, real: np.ndarray) -> tuple[Inputs, Tensor]:
        """What was read ahead, where that is what is wanted."""
        if self._ahead:
            wanted, stream = self._ahead[0]
            if wanted and np.array_equal(wanted[0], real):
                wanted.popleft()
                return next(stream)
            self._ahead.clear()
        return self.rows.read(real)

    @cached_property
    def _ahead(self) -> list[tuple[deque[np.ndarray], Iterator[tuple[Inputs, Tensor]]]]:
        return []


Samples = MemorySamples | DatasetSamples


def samples_of(inputs: "Inputs | DatasetRows", y: Tensor, device: torch.device, dtype: torch.dtype) -> Samples:
    """Rows where they are computed on, in memory one after the other: columns may lie so in a table that was given."""
    if isinstance(inputs, DatasetRows):
        return DatasetSamples(inputs, device, dtype)
    return MemorySamples(cast(inputs, device, dtype), y.to(device).contiguous())


def _real(rows: np.ndarray, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The rows of minibatches [L, B] that are not padding."""
    return np.concatenate([own[:count] for own, count in zip(rows, counts, strict=False)])

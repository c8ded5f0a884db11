"""Updates that stay in the replies they came in.

A round of n replies of d numbers is n d numbers that Flower holds in memory already. What is needed of the updates
Δ_k = w_k − w^(t) is mostly a few numbers each, their norms, and one sum of them: both are added up over short blocks of
all replies, each no longer than a processor's cache, so that nothing as long as n d is written and nothing is read more
than twice. Only who asks for the updates side by side (`rows`) gets a stack of them, made once.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.messages import OpenSum, OpenUpdates
from fedunfold.core.update_parts import PART

Pieces = Sequence[np.ndarray]


class ReplyUpdates(OpenUpdates):
    """The updates of a round, read off the replies whenever they are needed.

    Args:
        clients: Indices of the clients they come from, [n].
        replies: The trained arrays of each, flat, in the order of the vector; all are finite.
        model: w^(t), [d].
        norms: ‖Δ_k‖ [n] without buffers (`measure`).

    >>> replies = [[np.float32([1, 2]), np.float32([3])], [np.float32([5, 6]), np.float32([7])]]
    >>> updates = ReplyUpdates(torch.arange(2), replies, torch.ones(3), torch.zeros(2))
    >>> updates.weighted_sum(torch.tensor([0.5, 0.25])).total.tolist()
    [1.0, 1.75, 2.5]
    """

    def __init__(self, clients: Tensor, replies: Sequence[Pieces], model: Tensor, norms: Tensor) -> None:
        # As a frozen dataclass does it; the rows are not set, but made when somebody asks for them.
        for name, value in {"clients": clients, "norms": norms, "replies": replies, "model": model}.items():
            object.__setattr__(self, name, value)

    replies: Sequence[Pieces]
    model: Tensor

    @cached_property
    def rows(self) -> Tensor:
        """Δ_k, [n, d]: a copy of all replies."""
        rows = np.empty((len(self.replies), len(self.model)), self.model.numpy().dtype)
        for begin, block in blocks(self.replies, self.model):
            rows[:, begin : begin + block.shape[1]] = block
        return torch.from_numpy(rows)

    def weighted_sum(self, coefficients: Tensor) -> OpenSum:
        if "rows" in vars(self):
            return super().weighted_sum(coefficients)
        total = np.zeros(len(self.model), self.model.numpy().dtype)
        chosen = coefficients[self.clients].numpy().astype(total.dtype)
        for begin, block in blocks(self.replies, self.model):
            part = total[begin : begin + block.shape[1]]
            # One after the other: a product of matrices would round an entry by where in the block it lies.
            for row, c in zip(block, chosen, strict=True):
                np.multiply(row, c, out=row)
                part += row
        return OpenSum(torch.from_numpy(total), self.clients, self)

    def inner_products(self, vector: Tensor) -> Tensor:
        if "rows" in vars(self):
            return super().inner_products(vector)
        values, found = vector.numpy(), np.zeros(len(self.replies))
        for begin, block in blocks(self.replies, self.model):
            found += block @ values[begin : begin + block.shape[1]]
        return torch.from_numpy(found).to(self.model.dtype)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """The updates a part at a time (`core.update_parts.InParts`)."""
        for begin, block in blocks(self.replies, self.model):
            yield begin, torch.from_numpy(block)

    def usable(self) -> Tensor:
        return torch.ones(len(self.replies), dtype=torch.bool)

    def copies(self) -> list[Tensor]:
        found = [torch.empty_like(self.model) for _ in self.replies]
        for begin, block in blocks(self.replies, self.model):
            for row, part in zip(found, block, strict=True):
                row.numpy()[begin : begin + len(part)] = part
        return found

    def select(self, accepted: Tensor) -> "ReplyUpdates":
        chosen = [reply for reply, taken in zip(self.replies, accepted.tolist(), strict=True) if taken]
        assert self.norms is not None
        return ReplyUpdates(self.clients[accepted], chosen, self.model, self.norms[accepted])


def measure(replies: Sequence[Pieces], model: Tensor, num_params: int) -> tuple[Tensor, Tensor]:
    """What has to be known of updates before anything is made of them, in one pass.

    Args:
        replies: The trained arrays of each client, flat, in the order of the vector.
        model: w^(t), [d].
        num_params: How many of its entries, the first ones, are no buffers.

    Returns:
        ‖Δ_k‖ [n] without buffers, and whether Δ_k, buffers included, is finite and small enough to be measured, [n].
    """
    squares, of_buffers = np.zeros(len(replies)), np.zeros(len(replies))
    with np.errstate(over="ignore", invalid="ignore"):
        for begin, block in blocks(replies, model):
            ours = max(0, min(num_params - begin, block.shape[1]))
            squares += [part @ part for part in block[:, :ours]]
            of_buffers += [part @ part for part in block[:, ours:]]
        whole = np.sqrt(squares + of_buffers).astype(model.numpy().dtype)
    return torch.from_numpy(np.sqrt(squares)), torch.from_numpy(np.isfinite(whole))


def blocks(replies: Sequence[Pieces], model: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """The updates a part at a time: where it begins, and its entries of all clients [n, about PART/n], which the next
    part is written over."""
    if not replies:
        return
    values, longest = model.numpy(), max(256, PART // len(replies))
    differences = np.empty((len(replies), min(longest, len(values))), values.dtype)
    first = 0
    for pieces in zip(*replies, strict=True):
        size = pieces[0].size
        for begin in range(0, size, longest):
            end = min(begin + longest, size)
            block, own = differences[:, : end - begin], values[first + begin : first + end]
            for row, piece in zip(block, pieces, strict=True):
                np.subtract(piece[begin:end], own, out=row, dtype=values.dtype)
            yield first + begin, block
        first += size

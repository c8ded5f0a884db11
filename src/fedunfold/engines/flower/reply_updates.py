"""Updates that stay in the replies they came in.

A round of n replies of d numbers is n d numbers that Flower holds in memory already. What is needed of the updates
Δ_k = w_k − w^(t) is mostly one sum of them, and whether they can be added up at all: both are found in one pass over
short pieces that a processor's cache holds, so that nothing as long as n d is written. Only who asks for the updates
side by side (`rows`) gets a stack of them, made once.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import FedunfoldError
from fedunfold.core.messages import OpenSum, OpenUpdates
from fedunfold.core.update_parts import PART, InParts

PIECE = 2**16
"""How many numbers of one reply are worked on at a time: 256 KB in single precision."""
Pieces = Sequence[np.ndarray]


class UnusableReplies(FedunfoldError):
    """Some updates are not finite, or too large to be measured.

    Attributes:
        clients: Their clients' indices.
    """

    def __init__(self, clients: list[int]) -> None:
        super().__init__(f"the updates of {len(clients)} clients cannot be added up.")
        self.clients = clients


class ReplyUpdates(OpenUpdates, InParts):
    """The updates of a round, read off the replies whenever they are needed.

    They are screened when they are read first, which may be when they are added up: whoever works with these has to
    expect `UnusableReplies`, leave those clients out and begin again.

    Args:
        clients: Indices of the clients they come from, [n].
        replies: The trained arrays of each, flat, in the order of the vector.
        model: w^(t), [d].
        num_params: How many of its entries, the first ones, are no buffers.

    >>> replies = [[np.float32([1, 2]), np.float32([3])], [np.float32([5, 6]), np.float32([7])]]
    >>> updates = ReplyUpdates(torch.arange(2), replies, torch.ones(3), 3)
    >>> updates.weighted_sum(torch.tensor([0.5, 0.25])).total.tolist()
    [1.0, 1.75, 2.5]
    """

    replies: Sequence[Pieces]
    model: Tensor
    num_params: int

    def __init__(self, clients: Tensor, replies: Sequence[Pieces], model: Tensor, num_params: int) -> None:
        # As a frozen dataclass does it; rows and norms are not set, but made when somebody asks for them.
        fields = {"clients": clients, "replies": replies, "model": model, "num_params": num_params}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @cached_property
    def norms(self) -> Tensor:
        """‖Δ_k‖ [n] without buffers."""
        return self._read()

    @cached_property
    def rows(self) -> Tensor:
        """Δ_k, [n, d]: a copy of all replies."""
        rows = np.empty((len(self.replies), len(self.model)), self.model.numpy().dtype)
        for begin, part in self.parts():
            rows[:, begin : begin + part.shape[1]] = part.numpy()
        return torch.from_numpy(rows)

    def weighted_sum(self, coefficients: Tensor) -> OpenSum:
        if "rows" in vars(self):
            return super().weighted_sum(coefficients)
        total = torch.zeros_like(self.model)
        self._add_up(coefficients, self._split(total))
        return OpenSum(total, self.clients, self)

    def move_model(self, coefficients: Tensor) -> bool:
        """w ← w + Σ_k c_k Δ_k in place of w^(t), with coefficients c [K]; the updates cannot be read afterwards.

        False where that would not be finite: then w stays.

        What is made meanwhile has the sizes of the model's arrays: it goes where those of an earlier round were,
        which a vector of all of them, too long for any of these places, does not.
        """
        models = self._split(self.model)
        found = [np.zeros_like(own) for own in models]
        self._add_up(coefficients, found)
        for piece, own in zip(found, models, strict=True):
            piece += own
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum(float(piece.sum()) for piece in found)
        if not np.isfinite(total):
            return False
        for piece, own in zip(found, models, strict=True):
            own[:] = piece
        return True

    def inner_products(self, vector: Tensor) -> Tensor:
        if "rows" in vars(self):
            return super().inner_products(vector)
        found = torch.zeros(len(self.replies), dtype=torch.float64)
        for begin, part in self.parts():
            found += part @ vector[begin : begin + part.shape[1]]
        return found.to(self.model.dtype)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """The updates a part at a time (`core.update_parts.InParts`)."""
        if not len(self.norms):
            return
        longest = max(256, PART // len(self.replies))
        block = np.empty((len(self.replies), longest), self.model.numpy().dtype)
        for begin, own, pieces, _ in self._aligned(longest):
            for row, piece in zip(block, pieces, strict=True):
                np.subtract(piece, own, out=row[: len(own)], dtype=own.dtype)
            yield begin, torch.from_numpy(block[:, : len(own)])

    def copies(self) -> list[Tensor]:
        found = [torch.empty_like(self.model) for _ in self.replies]
        for begin, part in self.parts():
            for row, values in zip(found, part, strict=True):
                row[begin : begin + len(values)] = values
        return found

    def select(self, accepted: Tensor) -> "ReplyUpdates":
        chosen = [reply for reply, taken in zip(self.replies, accepted.tolist(), strict=True) if taken]
        found = ReplyUpdates(self.clients[accepted], chosen, self.model, self.num_params)
        vars(found)["norms"] = self.norms[accepted]
        return found

    def _split(self, vector: Tensor) -> list[np.ndarray]:
        """The model's arrays in a vector, flat: views of it."""
        ends = np.cumsum([array.size for array in next(iter(self.replies), ())])
        return np.split(vector.numpy(), ends[:-1]) if len(ends) else []

    def _add_up(self, coefficients: Tensor, totals: Pieces) -> None:
        """Σ_k c_k Δ_k, added to these arrays."""
        vars(self).setdefault("norms", self._read(coefficients[self.clients].numpy(), totals))

    def _read(self, coefficients: np.ndarray | None = None, totals: Pieces = ()) -> Tensor:
        """The norms, and in the same pass Σ_k c_k Δ_k; UnusableReplies where there cannot be such a sum."""
        n, dtype = len(self.replies), self.model.numpy().dtype
        chosen = None if coefficients is None else coefficients.astype(dtype)
        squares, of_buffers = np.zeros(n), np.zeros(n)
        scratch = np.empty(min(PIECE, len(self.model)), dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin, own, pieces, total in self._aligned(PIECE, totals):
                delta, ours = scratch[: len(own)], max(0, min(self.num_params - begin, len(own)))
                for k, piece in enumerate(pieces):
                    np.subtract(piece, own, out=delta, dtype=dtype)
                    squares[k] += delta[:ours] @ delta[:ours]
                    if ours < len(own):
                        of_buffers[k] += delta[ours:] @ delta[ours:]
                    if chosen is not None:
                        # Entry by entry: a product of matrices would round it by where in the piece it lies.
                        np.multiply(delta, chosen[k], out=delta)
                        total += delta
            whole = np.sqrt(squares + of_buffers).astype(dtype)
        if not np.isfinite(whole).all():
            raise UnusableReplies(self.clients[~torch.from_numpy(np.isfinite(whole))].tolist())
        return torch.from_numpy(np.sqrt(squares))

    def _aligned(
        self, longest: int, totals: Pieces = ()
    ) -> Iterator[tuple[int, np.ndarray, list[np.ndarray], np.ndarray]]:
        """Where a piece of the vectors begins, the model's, those of all replies, and that of their sum if any."""
        first = 0
        for arrays, own, total in zip_longest(zip(*self.replies, strict=True), self._split(self.model), totals):
            for begin in range(0, len(own), longest):
                piece = slice(begin, begin + longest)
                sums = own[:0] if total is None else total[piece]
                yield first + begin, own[piece], [array[piece] for array in arrays], sums
            first += len(own)

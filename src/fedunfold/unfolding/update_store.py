"""What the walk back needs of all rounds' updates: T · P · d numbers, in full, in half, or on disk.

The walk back asks for inner products ⟨ū, m_k⟩ alone, so that an update kept with errors of relative size ε changes
them, and the gradient of the weights, by about ε. `half` keeps m_k / max|m_k| in half precision (ε ≤ 2⁻¹¹ of the
largest entry, and errors of d entries mostly cancel), `disk` keeps all digits in a temporary file.
"""

import math
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal, Protocol

import torch
from torch import Tensor

from fedunfold.aggregation.absent import Contributions
from fedunfold.core.errors import InputError
from fedunfold.core.federation import HiddenSum

UpdateStorage = Literal["full", "half", "disk"]


class Entered(Protocol):
    """Updates that entered a round: whose they are, and their inner products with a vector."""

    @property
    def clients(self) -> Tensor: ...

    def along(self, vector: Tensor) -> Tensor:
        """⟨v, m_k⟩, [n]."""
        ...


@dataclass(frozen=True)
class _Kept:
    """Updates to be read one by one."""

    clients: Tensor
    rows: tuple[Callable[[], Tensor], ...]

    def along(self, vector: Tensor) -> Tensor:
        return torch.stack([row() @ vector for row in self.rows]) if self.rows else vector.new_zeros(0)


class UpdateStore(AbstractContextManager["UpdateStore"]):
    """Keeps the rounds of one run until it is walked back; a client's update is kept once, however long it is used."""

    def __init__(self, kind: UpdateStorage) -> None:
        self._kind = kind
        self._opened = ExitStack()
        self._file: IO[bytes] | None = None
        self._latest: dict[int, Callable[[], Tensor]] = {}

    def keep(self, entering: Contributions | HiddenSum, present: Tensor) -> Entered:
        """A round's contributions as they are, or in a form that takes less memory."""
        if self._kind == "full" or not isinstance(entering, Contributions):
            return entering
        there = torch.nonzero(present).flatten().tolist()
        fresh = entering.fresh
        if entering.memory and there:
            fresh = torch.stack([entering.memory[k] for k in there])  # without running statistics
        self._latest |= zip(there, self._rows(fresh), strict=True)
        return _Kept(entering.clients, tuple(self._latest[k] for k in entering.clients.tolist()))

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _rows(self, updates: Tensor) -> list[Callable[[], Tensor]]:
        """How to get at each of a round's updates again; they lie in one piece, or memory would fall to pieces."""
        if self._kind == "disk":
            return self._on_disk(updates)
        largest: Tensor = updates.norm(math.inf, dim=1).clamp(min=torch.finfo(updates.dtype).tiny)
        halves = torch.empty_like(updates, dtype=torch.half)
        for row, update, most in zip(halves, updates, largest, strict=True):
            row.copy_(update / most)  # one by one: all at once would take twice as much memory as it saves

        def restored(i: int) -> Tensor:
            return halves[i].to(largest.dtype) * largest[i]

        return [partial(restored, i) for i in range(len(halves))]

    def _on_disk(self, updates: Tensor) -> list[Callable[[], Tensor]]:
        content = updates.cpu().contiguous().numpy()
        try:
            if self._file is None:
                self._file = self._opened.enter_context(
                    tempfile.TemporaryFile(prefix="fedunfold-tape-")  # noqa: SIM115  (closed by __exit__)
                )
            file, begin = self._file, self._file.seek(0, os.SEEK_END)
            file.write(content.data)
            file.flush()
        except OSError as error:
            raise InputError(
                f"the tape of updates cannot be written to {tempfile.gettempdir()}: {error.strerror}; make room there, "
                "name another folder in TMPDIR, or keep the tape in half precision."
            ) from error
        dtype, device, count = updates.dtype, updates.device, updates[0].nbytes if len(updates) else 0

        def read(i: int) -> Tensor:
            found = os.pread(file.fileno(), count, begin + i * count)
            return torch.frombuffer(bytearray(found), dtype=dtype).to(device)

        return [partial(read, i) for i in range(len(updates))]

"""What the backward pass needs of all rounds' updates: T · P · d numbers, in full, in half, or on disk.

It needs inner products ⟨ū, m_k⟩ alone, so that an update stored with errors of relative size ε changes them, and
the gradient of the weights, by about ε. `half` stores m_k / max|m_k| in half precision (ε ≤ 2⁻¹¹ of the
largest entry, and errors of d entries mostly cancel), `disk` stores all digits in a temporary file.
"""

import math
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal

import torch
from torch import Tensor

from fedunfold.core.errors import WriteError
from fedunfold.core.messages import OpenSum, WeightedSum

UpdateStorage = Literal["full", "half", "disk"]


@dataclass(frozen=True)
class _Rows:
    """Updates to be read one by one."""

    clients: Tensor
    rows: tuple[Callable[[], Tensor], ...]

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, m_k⟩, [n]."""
        return torch.stack([row() @ vector for row in self.rows]) if self.rows else vector.new_zeros(0)


StoredUpdates = WeightedSum | _Rows
"""Updates that entered a round: whose they are, and their inner products with a vector."""


class UpdateStore(AbstractContextManager["UpdateStore"]):
    """Stores the rounds of one run until its backward pass; a client's update once, however long it is used."""

    def __init__(self, kind: UpdateStorage) -> None:
        self._kind = kind
        self._opened = ExitStack()
        self._file: IO[bytes] | None = None
        self._latest: dict[int, Callable[[], Tensor]] = {}

    def add(self, entered: WeightedSum, participated: Tensor) -> StoredUpdates:
        """Store what entered a round as it is, or in a form that takes less memory."""
        if self._kind == "full" or not isinstance(entered, OpenSum):
            return entered
        clients, rows = entered.clients, entered.updates.rows
        if not bool((fresh := participated[clients]).all()):  # some are remembered from earlier rounds
            clients, rows = clients[fresh], rows[fresh.to(rows.device)]
        self._latest |= zip(clients.tolist(), self._readers(rows), strict=True)
        return _Rows(entered.clients, tuple(self._latest[k] for k in entered.clients.tolist()))

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _readers(self, updates: Tensor) -> list[Callable[[], Tensor]]:
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
                    tempfile.TemporaryFile(prefix="fedunfold-updates-")  # noqa: SIM115  (closed by __exit__)
                )
            file, begin = self._file, self._file.seek(0, os.SEEK_END)
            file.write(content.data)
            file.flush()
        except OSError as error:
            raise WriteError(
                f"the updates of all rounds cannot be written to {tempfile.gettempdir()}: {error.strerror}; make room "
                "there, name another folder in TMPDIR, or store them in half precision (update_storage 'half')."
            ) from error
        dtype, device, count = updates.dtype, updates.device, updates[0].nbytes if len(updates) else 0

        def read(i: int) -> Tensor:
            found = os.pread(file.fileno(), count, begin + i * count)
            return torch.frombuffer(bytearray(found), dtype=dtype).to(device)

        return [partial(read, i) for i in range(len(updates))]

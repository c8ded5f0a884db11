"""A model's named arrays as one vector, and back."""

from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedunfold.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of the arrays, as the server sent them first.

    Floating-point arrays are what is averaged; others (counters) are carried along as they are.
    """

    shapes: dict[str, tuple[int, ...]]
    types: dict[str, np.dtype[np.generic]]
    initial: ArrayRecord

    @classmethod
    def of(cls, record: ArrayRecord) -> "Layout":
        arrays = {name: array.numpy() for name, array in record.items()}
        layout = cls({n: a.shape for n, a in arrays.items()}, {n: a.dtype for n, a in arrays.items()}, record)
        if not layout._averaged():
            raise InputError("the initial arrays hold no floating-point numbers to average.")
        return layout

    def flat(self, record: ArrayRecord) -> Tensor:
        """The averaged arrays one after the other; refused where the record is not made like the first one."""
        if set(record) != set(self.shapes):
            odd = sorted(set(record) ^ set(self.shapes))
            raise InputError(f"has other arrays than were sent ('{odd[0]}')")
        pieces = []
        for name in self._averaged():
            try:
                array = record[name].numpy()
            except (ValueError, TypeError, EOFError) as error:
                raise InputError(f"has an array '{name}' that cannot be read") from error
            if array.shape != self.shapes[name] or not np.issubdtype(array.dtype, np.floating):
                raise InputError(
                    f"has '{name}' of shape {list(array.shape)} and type {array.dtype} in place of "
                    f"{list(self.shapes[name])} and {self.types[name]}"
                )
            pieces.append(torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).to(self._working_type()))
        return torch.cat(pieces)

    def record(self, flat: Tensor, others: ArrayRecord | None) -> ArrayRecord:
        """The vector as named arrays, in the types they came in; the rest from `others`, or as at first."""
        sizes = [int(np.prod(self.shapes[name])) for name in self._averaged()]
        pieces = dict(zip(self._averaged(), torch.split(flat, sizes), strict=True))
        arrays = {}
        for name in self.shapes:
            if name in pieces:
                arrays[name] = Array(pieces[name].numpy().astype(self.types[name]).reshape(self.shapes[name]))
            else:
                source = others if others is not None and name in others else self.initial
                arrays[name] = source[name]
        return ArrayRecord(arrays)

    def _averaged(self) -> list[str]:
        return [name for name, kind in self.types.items() if np.issubdtype(kind, np.floating)]

    def _working_type(self) -> torch.dtype:
        wide = any(self.types[name] == np.float64 for name in self._averaged())
        return torch.float64 if wide else torch.float32

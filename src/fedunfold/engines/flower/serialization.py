"""Arrays as they come off the wire, and a model's named arrays as one vector and back.

What a client sends is checked before anything is allocated for it: the header of a numpy file says how large it is,
and has to agree with the bytes that came and with what was requested.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout, is_running_statistic
from fedunfold.data.npz import read_header

Shape = tuple[int, ...]


def read_array(array: Array, name: str) -> np.ndarray:
    """A plain numeric array of at most 8 bytes a number, in this machine's byte order."""
    file = io.BytesIO(array.data)
    try:
        shape, columns_first, dtype = read_header(file)
    except ValueError as error:
        raise InputError(f"has an array '{name}' that cannot be read") from error
    begin = file.tell()
    if columns_first and len(shape) > 1:
        raise InputError(f"has an array '{name}' that cannot be read, in Fortran order")
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise InputError(f"has an array '{name}' of type {dtype}")
    if prod(shape) * dtype.itemsize != len(array.data) - begin:
        raise InputError(f"has an array '{name}' of other length than its shape {list(shape)} says")
    values = np.frombuffer(array.data, dtype, prod(shape), begin).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def tensors(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """All arrays of a record."""
    return {name: torch.from_numpy(read_array(array, name)) for name, array in record.items()}


@dataclass(frozen=True)
class RecordLayout:
    """A model's arrays as the server sent them first.

    Floating-point arrays are what is averaged, buffers at the end; the others (counters) are carried along as they are.

    Attributes:
        shapes: Shape of each array.
        types: Type of each array.
    """

    shapes: dict[str, Shape]
    types: dict[str, np.dtype[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> "RecordLayout":
        """The layout of a record; one without anything to average is refused."""
        arrays = {name: array.numpy() for name, array in record.items()}
        layout = cls({n: a.shape for n, a in arrays.items()}, {n: a.dtype for n, a in arrays.items()})
        if not layout._averaged:
            raise InputError("the initial arrays hold no floating-point numbers to average.")
        return layout

    def read(self, record: ArrayRecord) -> tuple[Tensor, dict[str, Array]]:
        """The averaged arrays as one vector, and the others.

        Args:
            record: Arrays of a client; refused where names, shapes or types are not this layout's.
        """
        if set(record) != set(self.shapes):
            odd = sorted(set(record) ^ set(self.shapes))
            raise InputError(f"has other arrays than were sent ('{odd[0]}')")
        arrays = {name: self._checked(record[name], name) for name in self.shapes}
        wide = any(self.types[name] == np.float64 for name in self._averaged)
        dtype = torch.float64 if wide else torch.float32
        pieces = [torch.from_numpy(arrays[name].reshape(-1)).to(dtype) for name in self._averaged]
        return torch.cat(pieces), {name: record[name] for name in self.shapes if name not in self._averaged}

    def record(self, model: Tensor, others: Mapping[str, Array]) -> ArrayRecord:
        """The vector as named arrays, in the types they came in, with the others beside them."""
        arrays, pieces = dict(others), torch.split(model, [prod(self.shapes[name]) for name in self._averaged])
        for name, piece in zip(self._averaged, pieces, strict=True):
            arrays[name] = Array(piece.numpy().astype(self.types[name]).reshape(self.shapes[name]))
        return ArrayRecord({name: arrays[name] for name in self.shapes})

    def _checked(self, array: Array, name: str) -> np.ndarray:
        values, shape, dtype = read_array(array, name), self.shapes[name], self.types[name]
        fits = values.dtype.kind == "f" if dtype.kind == "f" else values.dtype == dtype
        if values.shape != shape or not fits:
            raise InputError(
                f"has '{name}' of shape {list(values.shape)} and type {values.dtype} in place of {list(shape)} and "
                f"{dtype}"
            )
        return values

    @cached_property
    def params(self) -> ParamLayout:
        """What the entries of the vector are."""
        buffers = tuple(filter(is_running_statistic, self._averaged))
        names = tuple(name for name in self._averaged if name not in buffers)
        shapes, buffer_shapes = (tuple(torch.Size(self.shapes[name]) for name in some) for some in (names, buffers))
        return ParamLayout(names, shapes, buffers, buffer_shapes)

    @cached_property
    def _averaged(self) -> list[str]:
        return sorted((name for name, kind in self.types.items() if kind.kind == "f"), key=is_running_statistic)

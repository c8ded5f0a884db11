"""A model as Flower carries it, named arrays of any numeric type, and as the vector that all else works on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout, is_running_statistic
from fedunfold.engines.flower.bfloat16 import BFLOAT16, read_update
from fedunfold.engines.flower.wire import read_array

Shape = tuple[int, ...]
NARROW, WIDE = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(frozen=True)
class ModelArrays:
    """A model's arrays off the wire.

    Attributes:
        pieces: The trained arrays, flat, in the order of the vector; where they can be, views of the bytes that came.
        counters: The others, which hold whole numbers.
        types: In which type each array is to be given back: its own, or float64 for the mean of whole numbers.
    """

    pieces: tuple[np.ndarray, ...]
    counters: Mapping[str, np.ndarray]
    types: Mapping[str, np.dtype[Any]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the vector: double precision where one of the trained arrays needs it."""
        wide = any(piece.dtype.kind != "f" or piece.dtype == WIDE for piece in self.pieces)
        return WIDE if wide else NARROW

    @property
    def vector(self) -> Tensor:
        """w [d], running statistics at the end: a copy."""
        return torch.from_numpy(np.concatenate(self.pieces, dtype=self.dtype))

    @property
    def has_finite_counters(self) -> bool:
        """A client may send counters as floating-point numbers."""
        return all(bool(np.isfinite(values).all()) for values in self.counters.values())


@dataclass(frozen=True)
class RecordLayout:
    """A model's arrays as the server sent them first.

    Floating-point arrays are what is trained. Arrays of whole numbers, such as the counters of a normalisation layer,
    are averaged beside them, unless there are no others.

    Attributes:
        shapes: Shape of each array.
        trained: Names of the arrays that make up the vector, running statistics at the end.
    """

    shapes: dict[str, Shape]
    trained: tuple[str, ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> "RecordLayout":
        """The layout of a record; one without arrays is refused."""
        try:
            arrays = {name: read_array(array, name) for name, array in record.items()}
        except InputError as error:
            raise InputError(f"the initial model {error}; give arrays of numbers.") from error
        trained = [name for name, values in arrays.items() if values.dtype.kind == "f"] or list(arrays)
        if not trained:
            raise InputError("the initial arrays are empty; give those of a model.")
        return cls({name: a.shape for name, a in arrays.items()}, tuple(sorted(trained, key=is_running_statistic)))

    def read(self, record: ArrayRecord, sent: ArrayRecord | None = None) -> ModelArrays:
        """The arrays of a client.

        Args:
            record: They may be of any numeric type; they are refused where names or shapes are not this layout's.
            sent: What the client was sent; without it, updates in bfloat16 are refused.
        """
        if missing := sorted(self.shapes.keys() - record.keys()):
            raise InputError(f"has no array '{missing[0]}', which the initial arrays have")
        if added := sorted(record.keys() - self.shapes.keys()):
            raise InputError(f"has an array '{added[0]}', which the initial arrays do not have")
        arrays = {name: self._checked(record[name], name, sent) for name in self.shapes}
        types = {name: a.dtype if a.dtype.kind == "f" else WIDE for name, a in arrays.items()}
        pieces = tuple(arrays[name].reshape(-1) for name in self.trained)
        counters = {name: a.astype(WIDE) for name, a in arrays.items() if name not in self.trained}
        return ModelArrays(pieces, counters, types)

    def record(
        self, vector: Tensor, counters: Mapping[str, np.ndarray], types: Mapping[str, np.dtype[Any]]
    ) -> ArrayRecord:
        """Named arrays of the types they are to be given back in."""
        pieces = torch.split(vector, [math.prod(self.shapes[name]) for name in self.trained])
        found = dict(counters) | {n: piece.numpy() for n, piece in zip(self.trained, pieces, strict=True)}
        return ArrayRecord(
            {n: Array(found[n].astype(types[n], copy=False).reshape(shape)) for n, shape in self.shapes.items()}
        )

    def _checked(self, array: Array, name: str, sent: ArrayRecord | None) -> np.ndarray:
        if array.dtype == BFLOAT16 and sent is not None:
            values = read_update(array, name, read_array(sent[name], name))
        else:
            values = read_array(array, name)
        if values.shape != self.shapes[name]:
            raise InputError(
                f"has '{name}' of shape {list(values.shape)} in place of {list(self.shapes[name])}, the initial one"
            )
        return values

    @cached_property
    def params(self) -> ParamLayout:
        """What the entries of the vector are."""
        buffers = tuple(filter(is_running_statistic, self.trained))
        names = tuple(name for name in self.trained if name not in buffers)
        shapes, buffer_shapes = (tuple(torch.Size(self.shapes[name]) for name in some) for some in (names, buffers))
        return ParamLayout(names, shapes, buffers, buffer_shapes)

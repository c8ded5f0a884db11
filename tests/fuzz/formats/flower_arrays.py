"""Arrays off the wire, alone and as a model's."""

import io
from collections.abc import Mapping
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord

from fedunfold.engines.flower.model_arrays import RecordLayout
from fedunfold.engines.flower.wire import read_array
from tests.fuzz.judging import understood_by_any
from tests.fuzz.mutation import of_numpy as mutate

__all__ = ["fuzz", "mutate", "seeds"]

LAYOUT = RecordLayout.of(ArrayRecord({"weight": Array(np.ones((3, 4), np.float32)), "running_mean": Array(np.ones(3))}))


def fuzz(data: bytes) -> bool:
    array = Array("float32", (3, 4), "numpy.ndarray", data)
    model = ArrayRecord({"weight": array, "running_mean": Array(np.ones(3))})
    return understood_by_any((partial(read_array, array, "a"), partial(LAYOUT.read, model)), "has ")


def seeds() -> Mapping[str, bytes]:
    found = {}
    arrays: dict[str, np.ndarray] = {
        "float32": np.ones((3, 4), np.float32),
        "int64": np.arange(3),
        "swapped": np.ones(3, ">f8"),
    }
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array)
        found[name] = file.getvalue()
    return found

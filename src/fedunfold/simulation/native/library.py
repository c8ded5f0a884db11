"""The compiled `walk.cpp`, where it was built with the package and the processor has what it was built for."""

import ctypes
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

VECTORS = ("AVX2", "AVX512")  # as torch names what a processor can do
TYPES = {torch.float32: "float", torch.float64: "double"}
COUNTS = ("layers", "lanes", "steps", "rows", "threads", "start_stride", "along")
POINTERS = (
    *("sizes", "x", "marks", "background", "overlaps", "labels", "batches", "counts", "means"),
    *("step_sizes", "factors", "class_weights", "start", "models", "losses", "sums"),
)


class Round(ctypes.Structure):
    """`Round` of `stack.hpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in COUNTS),
        ("mu", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in POINTERS),
    )


def is_built() -> bool:
    """Whether walks can be called; without a compiler where the package was installed, torch makes them."""
    return _library() is not None


def call(name: Literal["forward", "backward"], dtype: torch.dtype, round: Round) -> None:
    """One of the walks, for models of a type."""
    library = _library()
    assert library is not None
    if getattr(library, f"{name}_{TYPES[dtype]}")(ctypes.byref(round)) != 0:
        raise MemoryError("there is not enough memory, or no thread to be had, for the local training of a round.")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    found = find_spec("fedunfold.simulation.native._walk")
    if found is None or found.origin is None or torch.backends.cpu.get_cpu_capability() not in VECTORS:
        return None
    return ctypes.CDLL(found.origin)

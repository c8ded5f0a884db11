"""The compiled `module.cpp`, where it was built with the package and the processor has what it was built for."""

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch

log = logging.getLogger("fedunfold")

VECTORS = ("AVX2", "AVX512")  # as torch names what a processor can do
TYPES = {torch.float32: "float", torch.float64: "double"}
COUNTS = ("layers", "lanes", "steps", "rows", "threads", "start_stride", "along")
WALKS = tuple(f"{name}_{of}" for name in ("forward", "backward", "predict") for of in TYPES.values())
FUNCTIONS = ("shuffle_rows", "last_rows", *WALKS)
POINTERS = (
    *("sizes", "x", "marks", "background", "overlaps", "labels", "batches", "counts", "means"),
    *("step_sizes", "factors", "class_weights", "start", "models", "losses", "sums"),
    *("predicted", "row_losses", "stopped"),
)


class Round(ctypes.Structure):
    """`Round` of `mlp.hpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in COUNTS),
        ("mu", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in POINTERS),
    )


def is_built() -> bool:
    """Whether walks can be called; without a compiler where the package was installed, torch makes them."""
    return _library() is not None


def call(name: Literal["forward", "backward", "predict"], dtype: torch.dtype, round: Round, *, is_long: bool) -> None:
    """One of the walks, for models of a type. A long one can be interrupted."""
    walk, stopped = getattr(_library(), f"{name}_{TYPES[dtype]}"), ctypes.c_int64(0)
    round.stopped = ctypes.addressof(stopped)

    def work() -> bool:
        return bool(walk(ctypes.byref(round)))

    if _interruptible(work, stopped) if is_long else work():
        raise MemoryError("there is not enough memory for a round.")


def shuffle(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray, threads: int = 1) -> None:
    """Orders of rows; `shuffling.py` says of what, and that all epochs lie within the rows."""
    _, lanes, width = rows.shape
    to, *drawn = _pointers(rows, keys, epochs)
    counts = [ctypes.c_int64(count) for count in (lanes, width, len(keys), threads)]
    if _loaded().shuffle_rows(to, *counts[:2], *drawn, *counts[2:]):
        raise MemoryError("there is not enough memory for the minibatches of a round.")


def shuffle_ends(ends: np.ndarray, keys: np.ndarray, epochs: np.ndarray) -> None:
    """The ends of orders; `shuffling.py` says of what, and that there is room for them."""
    if _loaded().last_rows(*_pointers(ends, keys, epochs), ctypes.c_int64(len(keys))):
        raise MemoryError("there is not enough memory for the minibatches of a round.")


def _pointers(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray) -> list[ctypes.c_void_p]:
    arrays = (rows, np.int32), (keys, np.uint64), (epochs, np.int64)
    if (
        not all(array.flags.c_contiguous and array.dtype == dtype for array, dtype in arrays)
        or not rows.flags.writeable
    ):
        raise ValueError("compiled code shuffles contiguous arrays of int32, by keys of uint64 and epochs of int64.")
    return [ctypes.c_void_p(array.ctypes.data) for array, _ in arrays]


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    return library


def _interruptible(work: Callable[[], bool], stopped: ctypes.c_int64) -> bool:
    """Python hears of Ctrl-C only where it waits itself, so that compiled code has to run elsewhere. It has ended when
    this returns or raises: it reads and writes memory that is then given away."""
    found: list[bool] = []
    lock, begun, ended = threading.Lock(), threading.Event(), threading.Event()

    def run() -> None:
        with lock:
            if stopped.value:
                return
            begun.set()
        found.append(work())
        ended.set()

    try:
        threading.Thread(target=run).start()
        ended.wait()
    except BaseException:
        # Also where the thread was being started: from here on it has begun, or it never will.
        with lock:
            stopped.value = 1
        while begun.is_set() and not ended.is_set():
            with suppress(KeyboardInterrupt):
                ended.wait()
        raise
    return found[0]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    found = find_spec("fedunfold.engines.simulation.backends.cpu._local_training")
    if found is None or found.origin is None or torch.backends.cpu.get_cpu_capability() not in VECTORS:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        size = int(library.round_bytes())
    except (OSError, AttributeError) as error:
        log.warning("rounds are made by torch, because the compiled walk cannot be loaded: %s", error)
        return None
    if size != ctypes.sizeof(Round) or not all(hasattr(library, name) for name in FUNCTIONS):
        log.warning(
            "rounds are made by torch, because the compiled walk is another version's; install fedunfold again."
        )
        return None
    return library

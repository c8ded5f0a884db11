"""The compiled `module.cpp`, where it was built with the package and the processor has what it was built for."""

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
import torch

log = logging.getLogger("fedunfold")

EXTENSION = "fedunfold.engines.simulation.backends.cpu._local_training"
TARGETS = {"AVX2": "avx2", "AVX512": "avx512"}
"""What the code was compiled for, by torch's name of what a processor can do."""
TYPES = {torch.float32: "float", torch.float64: "double"}
Name = Literal["forward", "backward", "evaluate", "predict"]
TRAINING = tuple(
    f"{name}_{of}_{target}" for name in get_args(Name) for of in TYPES.values() for target in TARGETS.values()
)
FUNCTIONS = ("shuffle_rows", "last_rows", *TRAINING)
COUNTS = ("layers", "slots", "steps", "rows", "threads", "start_stride", "outer_on_path")
POINTERS = (
    *("sizes", "x", "nonzero", "background", "overlaps", "labels", "batches", "counts", "means"),
    *("step_sizes", "factors", "class_weights", "start", "models", "losses", "sums"),
    *("predicted", "row_losses", "stopped"),
)


class CallArgs(ctypes.Structure):
    """`CallArgs` of `mlp.hpp`, which documents every field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in COUNTS),
        ("mu", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in POINTERS),
    )


def is_built() -> bool:
    """Whether the compiled code can be called.

    Returns:
        False where the package was installed without a compiler, or the processor lacks its vector instructions: torch
        computes the same there.
    """
    return _library() is not None


def call(name: Name, dtype: torch.dtype, args: CallArgs, *, is_long: bool) -> None:
    """Call one of the compiled functions.

    Args:
        name: Which one.
        dtype: The type of models and data.
        args: What it reads and writes.
        is_long: Whether the call can be interrupted by Ctrl-C, at the price of a thread.

    Raises:
        MemoryError: If there is not enough memory for it.
    """
    target = TARGETS[torch.backends.cpu.get_cpu_capability()]
    compiled, stopped = getattr(_library(), f"{name}_{TYPES[dtype]}_{target}"), ctypes.c_int64(0)
    args.stopped = ctypes.addressof(stopped)

    def work() -> bool:
        return bool(compiled(ctypes.byref(args)))

    if _interruptible(work, stopped) if is_long else work():
        raise MemoryError("there is not enough memory for a round.")


def shuffle(rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray, threads: int = 1) -> None:
    """`permutations.shuffle_rows` by compiled code."""
    draw("shuffle_rows", rows, keys, epochs, *rows.shape[1:], threads)


def draw(name: str, rows: np.ndarray, keys: np.ndarray, epochs: np.ndarray, *counts: int) -> None:
    """A function of `permutations` by compiled code, which does not check that the rows have room for all epochs."""
    arrays = (rows, np.int32), (keys, np.uint64), (epochs, np.int64)
    as_compiled = all(array.flags.c_contiguous and array.dtype == dtype for array, dtype in arrays)
    if not (as_compiled and rows.flags.writeable):
        raise ValueError("compiled code shuffles contiguous arrays of int32, by keys of uint64 and epochs of int64.")
    pointers = (ctypes.c_void_p(array.ctypes.data) for array, _ in arrays)
    if getattr(_library(), name)(*pointers, *(ctypes.c_int64(count) for count in (len(keys), *counts))):
        raise MemoryError("there is not enough memory for the minibatches of a round.")


def _interruptible(work: Callable[[], bool], stopped: ctypes.c_int64) -> bool:
    """Python handles Ctrl-C only while its main thread waits, so compiled code runs in another one. It has ended when
    this returns or raises: it reads and writes memory that is freed then."""
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
    found = find_spec(EXTENSION)
    if found is None or found.origin is None or torch.backends.cpu.get_cpu_capability() not in TARGETS:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        size = int(library.call_args_bytes())
    except (OSError, AttributeError) as error:
        log.warning("rounds are computed by torch, because the compiled code cannot be loaded: %s", error)
        return None
    if size != ctypes.sizeof(CallArgs) or not all(hasattr(library, name) for name in FUNCTIONS):
        log.warning(
            "rounds are computed by torch, because the compiled code is another version's; install fedunfold again."
        )
        return None
    return library

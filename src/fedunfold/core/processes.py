"""Worker processes: fresh interpreters with one thread each, which end with the process that started them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of workers; what they have not begun is cancelled in the end.

    Args:
        processes: How many.
    """
    # A fresh interpreter each: a fork of a process that has used threads can hang.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """What a worker does first: it leaves Ctrl-C to its parent, and waits for its parent's end in a thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

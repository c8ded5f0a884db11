"""Tasks worked off by several processes.

Every process computes with one thread, whatever their number: more threads gain less than more tasks at the same
time, and the results do not depend on how many there are.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedunfold.core.errors import FedunfoldError
from fedunfold.studies.reproduction.records import Records
from fedunfold.studies.reproduction.tasks import Task

OnProgress = Callable[[str, float], None]
"""Hears the name of a task and the cost of what was done of it since the last time."""


def run_jobs(todo: Sequence[Task], records: Records, device: str, jobs: int, on_progress: OnProgress) -> None:
    """Do all tasks, `jobs` at a time; a task waits for the weights it needs."""
    if jobs == 1 or len(todo) < 2:
        _alone(todo, records, device, on_progress)
    else:
        _together(todo, records, device, min(jobs, len(todo)), on_progress)


def _alone(todo: Sequence[Task], records: Records, device: str, on_progress: OnProgress) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for task in todo:
            try:
                task.do(records, device, _steps(task, on_progress))
            except FedunfoldError as error:
                raise FedunfoldError(f"{task.name}: {error}") from error
    finally:
        torch.set_num_threads(before)


def _together(todo: Sequence[Task], records: Records, device: str, jobs: int, on_progress: OnProgress) -> None:
    # A fresh interpreter each: a fork of a process that has used threads can hang.
    context = multiprocessing.get_context("spawn")
    asked, told = context.SimpleQueue(), context.Queue()
    workers = [context.Process(target=_work, args=(asked, told, records, device), daemon=True) for _ in range(jobs)]
    # Ctrl-C reaches workers too, which inherit how it is taken: only the parent is to hear it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.signal(signal.SIGINT, before)
    waiting, running = list(todo), 0
    try:
        while waiting or running:
            while running < jobs and (ready := next((task for task in waiting if task.ready(records)), None)):
                waiting.remove(ready)
                asked.put(ready)
                running += 1
            if not running:
                raise FedunfoldError(f"{waiting[0].name}: the weights it needs are not there and not being learned.")
            name, part, ending = _hear(told, workers)
            on_progress(name, part)
            if isinstance(ending, str):
                raise FedunfoldError(ending)
            running -= ending is True
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _hear(told: Any, workers: Sequence[BaseProcess]) -> tuple[str, float, bool | str]:
    """The next message; a worker that died without one would otherwise be waited for in vain."""
    while True:
        try:
            message: tuple[str, float, bool | str] = told.get(timeout=1)
        except queue.Empty:
            dead = next((worker for worker in workers if not worker.is_alive()), None)
            if dead is not None:
                raise FedunfoldError(
                    f"a worker process ended with code {dead.exitcode} (out of memory?); run the same command "
                    "again to go on, with fewer --jobs."
                ) from None
        else:
            return message


def _work(asked: Any, told: Any, records: Records, device: str) -> None:
    """What a worker does until it is ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        task: Task = asked.get()

        def tell(name: str, part: float) -> None:
            told.put((name, part, False))

        try:
            task.do(records, device, _steps(task, tell))
            told.put((task.name, 0.0, True))
        except FedunfoldError as error:
            told.put((task.name, 0.0, f"{task.name}: {error}"))


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _steps(task: Task, on_progress: OnProgress) -> Callable[[float], None]:
    """From "this part is done" to "this much was done since"."""
    cost, before = task.cost, 0.0

    def report(part: float) -> None:
        nonlocal before
        on_progress(task.name, (part - before) * cost)
        before = part

    return report

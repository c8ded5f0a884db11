"""Jobs run by several processes.

Every process computes with one thread, whatever their number: more threads gain less than more jobs at the same time,
and the results do not depend on how many there are. The pool is ours because a `concurrent.futures` one cannot end a
running job, so that Ctrl-C would wait for the work, and a `multiprocessing.Pool` waits forever for a killed process.
"""

import multiprocessing
import queue
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from fedunfold.core.errors import FedunfoldError
from fedunfold.core.processes import start_worker
from fedunfold.core.threading import threads_for

OnPart = Callable[[float], None]
"""Called with the fraction of a job that is done."""
OnProgress = Callable[[str, float], None]
"""Called with the name of a job and the cost of what was done of it since the last time."""
Records = TypeVar("Records", contravariant=True)


class Job(Protocol[Records]):
    """A piece of work, in plain data that can be handed to another process."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def cost(self) -> float:
        """How long it takes, in any unit."""

    def ready(self, records: Records) -> bool:
        """Whether the weights that it needs exist."""

    def run(self, records: Records, device: str, on_part: OnPart) -> None:
        """Do it and save the record; a FedunfoldError names it."""


def run_jobs(
    todo: Sequence[Job[Records]], records: Records, device: str, processes: int, on_progress: OnProgress
) -> None:
    """Run all jobs; one waits for the weights it needs.

    Args:
        todo: The jobs.
        records: Where their records are saved.
        device: Where they compute.
        processes: How many run at a time; 1 runs them in this process.
        on_progress: Called as they proceed.

    Raises:
        FedunfoldError: A job failed, which it names, or a process was killed.
    """
    if processes == 1 or len(todo) < 2:
        with threads_for(0):
            for job in todo:
                job.run(records, device, _in_costs(job, on_progress))
    else:
        _run_apart(todo, records, device, min(processes, len(todo)), on_progress)


def _run_apart(
    todo: Sequence[Job[Records]], records: Records, device: str, count: int, on_progress: OnProgress
) -> None:
    # A fresh interpreter each: a fork of a process that has used threads can hang.
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.Queue()
    workers = [context.Process(target=_work, args=(inbox, outbox, records, device), daemon=True) for _ in range(count)]
    # Ctrl-C reaches the workers too, which inherit how it is handled: only the parent is to handle it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.signal(signal.SIGINT, before)
    waiting, running = list(todo), 0
    try:
        while waiting or running:
            while running < count and (ready := next((job for job in waiting if job.ready(records)), None)):
                waiting.remove(ready)
                inbox.put(ready)
                running += 1
            if not running:
                raise FedunfoldError(f"{waiting[0].name}: the weights it needs do not exist and are not being learned.")
            name, part, ending = _next_message(outbox, workers)
            on_progress(name, part)
            if isinstance(ending, str):
                raise FedunfoldError(ending)
            running -= ending is True
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _next_message(outbox: Any, workers: Sequence[BaseProcess]) -> tuple[str, float, bool | str]:
    """(job, cost, whether it ended or why it failed); a worker that died would otherwise be waited for in vain."""
    while True:
        try:
            message: tuple[str, float, bool | str] = outbox.get(timeout=1)
        except queue.Empty:
            dead = next((worker for worker in workers if not worker.is_alive()), None)
            if dead is not None:
                raise FedunfoldError(
                    f"a worker process ended with code {dead.exitcode} (out of memory?); run the same again to resume, "
                    "with fewer `jobs`."
                ) from None
        else:
            return message


def _work(inbox: Any, outbox: Any, records: Any, device: str) -> None:
    """What a worker does until it is ended."""
    start_worker()
    while True:
        job: Job[Any] = inbox.get()
        try:
            job.run(records, device, _in_costs(job, lambda name, part: outbox.put((name, part, False))))
            outbox.put((job.name, 0.0, True))
        except FedunfoldError as error:
            outbox.put((job.name, 0.0, str(error)))


def _in_costs(job: Job[Any], on_progress: OnProgress) -> OnPart:
    """From "this part is done" to "this much was done since"."""
    cost, before = job.cost, 0.0

    def report(part: float) -> None:
        nonlocal before
        on_progress(job.name, (part - before) * cost)
        before = part

    return report

"""The cases of one format, worked off in a process of its own."""

import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.fuzz.formats import Format, format_of
from tests.fuzz.judging import scratch
from tests.fuzz.watching import Watch

CORPUS = Path(__file__).parent / "corpus"
ROOM = 2**30
"""Bytes a case may allocate beyond what the process had before."""
SECONDS = 30
"""Of processor time, after which a case hangs."""


class Hangs(BaseException):
    """No `except Exception` takes it for an answer."""


def corpus_of(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def case(format: Format, corpus: list[bytes], name: str, seed: int, number: int) -> bytes:
    """Case `number`: a pure function of format, seed and number."""
    rng = Random(f"{name}/{seed}/{number}")
    data = rng.choice(corpus)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        data = format.mutate(data, rng)
    return data


def work(names: list[str], seed: int, cases: int, report: Path, failures: Path) -> None:
    """Work off so many cases of each format. A line in `report` says what came of it, the last where we are."""
    watch = Watch(scratch())
    for name in names:
        (report / "at").write_text(f"{name}, before its first case")
        format, corpus = format_of(name), corpus_of(name)
        for data in corpus:
            format.fuzz(data)  # loads what is loaded at first use
        understood = failed = 0
        with confined():
            for number in range(cases):
                (report / "at").write_text(f"{name} {number}")
                data = case(format, corpus, name, seed, number)
                try:
                    with watched(watch):
                        understood += format.fuzz(data)
                except (Exception, Hangs) as error:
                    failed += 1
                    _keep(failures, name, number, data, error)
        (report / name).write_text(json.dumps({"cases": cases, "understood": understood, "failed": failed}))


@contextmanager
def confined() -> Iterator[None]:
    """No more memory than a case may take."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    faulthandler.enable()
    warnings.simplefilter("error", RuntimeWarning)  # numbers that left their range are no answer
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    def hang(*_: Any) -> None:
        raise Hangs(f"after {SECONDS} s")

    signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    watch.seen.clear()
    watch.on = True
    try:
        yield
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert not watch.seen, watch.seen


def _keep(failures: Path, name: str, number: int, data: bytes, error: BaseException) -> None:
    failures.mkdir(parents=True, exist_ok=True)
    (failures / f"{name}-{number}").write_bytes(data)
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if "/tests/fuzz/" not in frame.filename), frames[-1])
    line = f"{name} {number}: {type(error).__name__}: {error!s:.300} ({Path(where.filename).name}:{where.lineno})"
    with (failures / "failures.txt").open("a") as file:
        file.write(line.replace("\n", " ") + "\n")

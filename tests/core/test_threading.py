"""Threads by the size of the work, and nothing left behind."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.core import threading
from fedunfold.core.messages import TrainRequest
from fedunfold.core.parts import LocalOptimizer
from fedunfold.core.threading import WORTH_THREADS, threads_for
from fedunfold.engines.simulation.backends.base import StepSums
from fedunfold.engines.simulation.backends.cpu import is_built
from fedunfold.engines.simulation.backends.cpu.local_training import CpuTrainer
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.local import momentum, sgd
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_work_takes_one_thread(two_threads: None) -> None:
    with threads_for(WORTH_THREADS - 1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with threads_for(WORTH_THREADS):
        assert torch.get_num_threads() == 2
    with threads_for(1):
        with threads_for(WORTH_THREADS, 2):
            assert torch.get_num_threads() == 2, "those that were available outside"
        assert torch.get_num_threads() == 1


def test_the_count_comes_back_after_an_error(two_threads: None) -> None:
    with pytest.raises(ZeroDivisionError), threads_for(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("optimizer", "expected"), [(sgd(), 1), (momentum(), 2)])
def test_compiled_code_works_while_torchs_threads_sleep(
    optimizer: LocalOptimizer, expected: int, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_built():
        pytest.skip("the compiled code was not built, or is for other processors")
    seen = set()
    for kind in (CpuTrainer, TorchTrainer):

        def forward(trainer: Any, start: Tensor, sums: StepSums, made: Any = kind.forward) -> Tensor:
            seen.add(torch.get_num_threads())
            return made(trainer, start, sums)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, "forward", forward)
    federation = simulated(tiny())
    request = TrainRequest("a", 0, federation.initial_model("a"), optimizer)
    monkeypatch.setattr(threading, "WORTH_THREADS", 1)
    federation.train([request])
    assert seen == {expected}


def test_a_run_leaves_the_count_as_it_was(two_threads: None) -> None:
    federation = simulated(tiny())
    assert federation.step_size == 3 * 3 * (4 * 5 + 4 + 3 * 4 + 3)
    run_rounds(federation, size(), 1)
    assert torch.get_num_threads() == 2

"""Threads by the size of the work, and nothing left behind."""

from collections.abc import Iterator

import pytest
import torch

from fedunfold.rounds import run_rounds
from fedunfold.threads import WORTH_THREADS, threads_for
from fedunfold.weighting import size
from tests.federations import simulated, tiny


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


def test_a_run_leaves_the_count_as_it_was(two_threads: None) -> None:
    federation = simulated(tiny())
    assert federation.step_size == 3 * 3 * (4 * 5 + 4 + 3 * 4 + 3)
    run_rounds(federation, size(), 1)
    assert torch.get_num_threads() == 2

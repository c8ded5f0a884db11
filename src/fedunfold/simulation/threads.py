"""How many threads a step is worth.

Small products do not gain from a second thread and lose much by waiting for it, most of all on a machine that
is busy with something else: on two cores a round of the digits takes several times as long with two threads as
with one. So the choice is made by the size of a step alone, and does not outlast the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_THREADS = 20_000_000
"""Multiplications of a forward pass of all clients' minibatches, above which torch's own thread count is used."""


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """One thread for small steps; what was set before is set again afterwards."""
    before = torch.get_num_threads()
    if multiplications >= WORTH_THREADS or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""How many of torch's threads some work is worth.

Small products and sums do not gain from a second thread and lose much by waiting for it, most of all on a machine that
is busy with something else: on two cores a round of the digits takes several times as long with two threads as with
one. A thread that has been woken also keeps waiting busily for some milliseconds, in the way of compiled code, which
has threads of its own. So the choice is made by the size of the work alone, and does not outlast it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_THREADS = 20_000_000
"""Operations at a time, such as multiplications of a forward pass of all clients' minibatches, that threads are for."""


@contextmanager
def threads_for(operations: int, available: int | None = None) -> Iterator[None]:
    """One thread for small work, and all for large work; the number before is restored afterwards.

    Args:
        operations: How large the work is.
        available: How many threads large work gets; by default as many as torch has now.
    """
    before = torch.get_num_threads()
    wanted = 1 if operations < WORTH_THREADS else before if available is None else available
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)

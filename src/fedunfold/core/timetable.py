"""Asynchronous rounds (FedBuff, Nguyen et al. 2022): who trains which model when, and which updates enter each step.

At any time C clients train, each the model that was the newest when it began. Updates that arrive go into a buffer;
when c of them are in it, the server makes a step from them, and model t becomes model t + 1. Whoever ends makes place
for another client, which begins with the newest model there is. A client whose update waits in the buffer does not
begin again before the step, so that every client counts at most once in it. A lost update takes its client's time and
does not arrive. The staleness of an update is the number of steps that the server made since its client began.

None of it depends on what the models are, so that it is settled before anybody trains.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedunfold.core.errors import InputError

MOST_LOST = 1000
"""So many updates for every one in the buffer may be lost before a step is given up."""


@dataclass(frozen=True)
class ServerStep:
    """One step of the server.

    Attributes:
        time: When it is made, in seconds from the beginning.
        clients: Whose updates it is made from, in ascending order.
        versions: Which model each of them was trained from.
    """

    time: float
    clients: tuple[int, ...]
    versions: tuple[int, ...]


def timetable(
    steps: int,
    num_clients: int,
    concurrency: int,
    buffer: int,
    order: Callable[[int], Sequence[int]],
    training: Callable[[int, int, int], tuple[float, bool]],
) -> list[ServerStep]:
    """The server's steps.

    Args:
        steps: How many.
        num_clients: K.
        concurrency: C.
        buffer: c, at most K.
        order: In which order clients are asked to train model t; busy ones are passed over.
        training: Of the n-th training of client k, from 0, which begins with model t: how long it takes, and whether
            its update arrives; of (k, n, t).

    Two clients at a time of three that take 1, 2 and 3 seconds, a buffer of two. The first ends at 1 and waits; the
    third begins in its place. The second ends at 2: the first step, after which the first begins again. It ends at 3
    and waits; the second begins again. The third ends at 4:

    >>> found = timetable(2, 3, 2, 2, lambda t: [0, 1, 2], lambda k, n, t: (k + 1.0, True))
    >>> [(step.time, step.clients, step.versions) for step in found]
    [(2.0, (0, 1), (0, 0)), (4.0, (0, 2), (1, 0))]
    """
    running: list[tuple[float, int, int, bool]] = []  # when it ends, client, model, whether the update arrives
    begun, busy = [0] * num_clients, [False] * num_clients
    now, free, found = 0.0, num_clients, []
    for t in range(steps):
        asked, place, lost = order(t), 0, 0
        waiting: list[tuple[int, int]] = []
        while len(waiting) < buffer:
            while len(running) < concurrency and free:
                while busy[asked[place]]:
                    place = (place + 1) % num_clients
                k, free = asked[place], free - 1
                seconds, arrives = training(k, begun[k], t)
                begun[k], busy[k] = begun[k] + 1, True
                heapq.heappush(running, (now + seconds, k, t, arrives))
            now, k, version, arrives = heapq.heappop(running)
            if arrives:
                waiting.append((k, version))
                continue
            busy[k], free, lost = False, free + 1, lost + 1
            if lost > MOST_LOST * buffer:
                raise InputError(
                    f"step {t}: {lost} updates were lost while the server waited for {buffer}; make clients likelier "
                    "to be reached, or the buffer smaller."
                )
        for k, _ in waiting:
            busy[k] = False
        free += buffer
        waiting.sort()
        found.append(ServerStep(now, tuple(k for k, _ in waiting), tuple(version for _, version in waiting)))
    return found

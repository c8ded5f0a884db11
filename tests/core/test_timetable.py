"""Asynchronous rounds: the order of events by hand, and what holds for all clients and speeds."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.timetable import ServerStep, timetable


def in_turn(clients: int) -> Callable[[int], list[int]]:
    return lambda t: list(range(clients))


def test_events_by_hand() -> None:
    """Clients take 1, 3 and 10 seconds, all three train, and the server steps from every second update.

    | time | event                                                     |
    |------|-----------------------------------------------------------|
    | 0    | a, b and c begin with model 0                             |
    | 1    | a arrives (model 0) and waits                             |
    | 3    | b arrives (model 0): step 0; a and b begin with model 1   |
    | 4    | a arrives (model 1) and waits                             |
    | 6    | b arrives (model 1): step 1; both begin with model 2      |
    | 7    | a arrives (model 2)                                       |
    | 9    | b arrives (model 2): step 2; both begin with model 3      |
    | 10   | c arrives (model 0, three steps old), a arrives: step 3   |
    """
    seconds = [1.0, 3.0, 10.0]
    found = timetable(4, 3, 3, 2, in_turn(3), lambda k, n, t: (seconds[k], True))
    assert found == [
        ServerStep(3.0, (0, 1), (0, 0)),
        ServerStep(6.0, (0, 1), (1, 1)),
        ServerStep(9.0, (0, 1), (2, 2)),
        ServerStep(10.0, (0, 2), (3, 0)),
    ]


def test_a_free_place_is_taken_at_once_and_with_the_newest_model() -> None:
    """One at a time of three clients: 0 from 0 to 1, 1 from 1 to 3 and, after the step, the next in order, 2."""
    orders = {0: [0, 1, 2], 1: [2, 0, 1]}
    found = timetable(2, 3, 1, 2, lambda t: orders[t], lambda k, n, t: (k + 1.0, True))
    assert found == [ServerStep(3.0, (0, 1), (0, 0)), ServerStep(7.0, (0, 2), (1, 1))]


def test_lost_updates_take_time_and_do_not_arrive() -> None:
    """The first training of client 0, from 0 to 1, is lost; it begins again and ends at 2."""
    found = timetable(1, 2, 2, 2, in_turn(2), lambda k, n, t: (1.0, (k, n) != (0, 0)))
    assert found == [ServerStep(2.0, (0, 1), (0, 0))]


def test_who_is_never_reached_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(InputError, match="step 0: 2001 updates were lost while the server waited for 2"):
        timetable(1, 2, 2, 2, in_turn(2), lambda k, n, t: (1.0, False))


@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=8),
    st.integers(1, 10),
    st.data(),
)
def test_what_holds_for_all_speeds(seconds: list[float], steps: int, data: st.DataObject) -> None:
    clients = len(seconds)
    concurrency = data.draw(st.integers(1, clients))
    buffer = data.draw(st.integers(1, clients))
    found = timetable(steps, clients, concurrency, buffer, in_turn(clients), lambda k, n, t: (seconds[k], True))
    assert len(found) == steps
    times = [0.0, *(step.time for step in found)]
    assert times == sorted(times)
    begun: set[tuple[int, int]] = set()
    for t, step in enumerate(found):
        assert len(step.clients) == buffer == len(set(step.clients))
        for k, version in zip(step.clients, step.versions, strict=True):
            assert 0 <= version <= t
            assert (k, version) not in begun  # nobody trains the same model twice, or is counted twice
            begun.add((k, version))
            # It began when model `version` was made or later, and took what it takes.
            assert step.time >= times[version] + seconds[k] - 1e-9


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=8), st.integers(1, 6))
def test_a_buffer_of_all_clients_is_a_synchronous_round(seconds: list[float], steps: int) -> None:
    clients = len(seconds)
    found = timetable(steps, clients, clients, clients, in_turn(clients), lambda k, n, t: (seconds[k], True))
    assert [step.versions for step in found] == [(t,) * clients for t in range(steps)]
    assert [step.time for step in found] == pytest.approx([(t + 1) * max(seconds) for t in range(steps)])

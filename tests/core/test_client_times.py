"""How long clients take: by hand, by trace, and as a pure function of who and when."""

import math

import numpy as np
import pytest

from fedunfold.core.client_times import ClientTimes, by_client
from fedunfold.core.errors import InputError

MANY = tuple(f"client-{k}" for k in range(4000))


def times(ids: tuple[str, ...] = MANY, steps: int = 10, **settings: float) -> ClientTimes:
    return ClientTimes(ids, lambda k, t: steps, (1.0,) * len(ids), **settings)  # type: ignore[arg-type]


def test_seconds_are_steps_times_speed_plus_delay() -> None:
    plain = times(seconds_per_step=0.25)
    assert plain.seconds("trial-0", 3, 0, 0) == 2.5
    slow = times(speed_spread=1.0)
    slowness = slow.seconds("trial-0", 3, 0, 0) / 10
    assert slow.seconds("trial-0", 3, 7, 0) == pytest.approx(
        10 * slowness
    )  # a client's speed is that of all its rounds
    both = times(speed_spread=1.0, delay=2.0)
    assert both.seconds("trial-0", 3, 0, 0) > slow.seconds("trial-0", 3, 0, 0)


def test_speeds_are_lognormal_and_delays_exponential() -> None:
    spread, delay = times(speed_spread=0.8), times(delay=5.0, steps=0)
    logs = np.log([spread.seconds("trial-0", k, 0, 0) / 10 for k in range(len(MANY))])
    assert abs(logs.mean()) < 4 * 0.8 / math.sqrt(len(MANY))
    assert logs.std() == pytest.approx(0.8, rel=0.05)
    waits = np.array([delay.seconds("trial-0", k, 0, 0) for k in range(len(MANY))])
    assert waits.mean() == pytest.approx(5.0, rel=0.1) and waits.std() == pytest.approx(5.0, rel=0.15)
    jitter = times(jitter=0.5)
    logs = np.log([jitter.seconds("trial-0", 0, n, 0) / 10 for n in range(2000)])
    assert logs.std() == pytest.approx(0.5, rel=0.1)


def test_draws_depend_on_seed_run_client_and_training_alone() -> None:
    few, more = times(("a", "b"), speed_spread=1.0, jitter=1.0), times(("x", "b", "a"), speed_spread=1.0, jitter=1.0)
    assert few.seconds("trial-0", 0, 4, 0) == more.seconds("trial-0", 2, 4, 0)
    found = {few.seconds(run, k, n, 0) for run in ("trial-0", "trial-1") for k in (0, 1) for n in (0, 1)}
    assert len(found) == 8


def test_an_update_arrives_as_often_as_its_client_is_reachable() -> None:
    flaky = ClientTimes(("a",), lambda k, t: 1, (0.3,))
    assert np.mean([flaky.arrives("trial-0", 0, n) for n in range(4000)]) == pytest.approx(0.3, abs=0.04)


def test_a_trace_is_read_in_turn_and_again_from_its_beginning() -> None:
    trace = by_client([("a", 2.0, False), ("b", 5.0, False), ("a", 3.0, True)])
    traced = ClientTimes(("a", "b"), lambda k, t: 99, (1.0, 1.0), trace=trace)
    assert [traced.seconds("trial-0", 0, n, 0) for n in range(3)] == [2.0, 3.0, 2.0]
    assert [traced.arrives("trial-0", 0, n) for n in range(3)] == [True, False, True]
    assert traced.reachable(1).tolist() == [0.0, 1.0] and traced.ever_arriving == 2
    with pytest.raises(InputError, match="no row for client 'c'"):
        ClientTimes(("a", "c"), lambda k, t: 1, (1.0, 1.0), trace=trace)

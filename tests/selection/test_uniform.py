import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.parts import CLIENT_SAMPLERS, KnownClients
from fedunfold.selection import Uniform


def of_sizes(*sizes: int) -> KnownClients:
    return KnownClients(0, [f"client-{k}" for k in range(len(sizes))], np.array(sizes))


def test_those_with_the_lowest_tickets() -> None:
    found = Uniform().sample(np.array([0.5, 0.1, 0.9, 0.3]), of_sizes(1, 1000, 1, 1), count=2)
    assert sorted(found.tolist()) == [1, 3]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9, unique=True), st.data())
def test_as_many_as_requested_and_nobody_twice(tickets: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(tickets)))
    found = Uniform().sample(np.array(tickets), of_sizes(*[1] * len(tickets)), count).tolist()
    assert len(set(found)) == count
    assert max(tickets[k] for k in found) == sorted(tickets)[count - 1]


def test_everybody_is_as_likely() -> None:
    assert Uniform().inclusion(of_sizes(1, 1000, 1, 1), count=3).tolist() == [0.75] * 4


def test_it_is_the_one_named_uniform() -> None:
    assert CLIENT_SAMPLERS.parse("uniform") == Uniform()

"""Who is whose neighbour: the same for all, chosen by nobody, and wide enough."""

from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.engines.flower.secagg.graph import COMPLETE, Graph, reach, two_thirds
from fedunfold.engines.flower.secagg.protocol import threshold


def graph(count: int, keys: bytes = b"keys") -> Graph:
    return Graph(tuple(f"site-{k}" for k in range(count)), keys)


@given(count=st.integers(2, 120), keys=st.binary(max_size=4))
def test_neighbours_are_each_others_and_equally_many(count: int, keys: bytes) -> None:
    found = graph(count, keys)
    neighbours = {member: set(found.neighbours(member)) for member in found.members}
    assert {len(others) for others in neighbours.values()} == {min(count - 1, 2 * reach(count))}
    assert all(member in neighbours[other] for member, others in neighbours.items() for other in others)
    assert all(found.holders(member) == tuple(sorted({member, *neighbours[member]})) for member in found.members)


def test_up_to_thirty_are_all_neighbours() -> None:
    assert graph(COMPLETE).is_complete and not graph(COMPLETE + 1).is_complete
    assert [2 * reach(n) for n in (31, 50, 100, 1000, 10_000, 100_000)] == [18, 30, 60, 198, 234, 246]


def test_the_order_follows_from_the_keys_alone() -> None:
    one, other = graph(50), graph(50, b"other keys")
    assert one.ring == Graph(one.members[::-1], b"keys").ring
    assert one.ring != other.ring and sorted(one.ring) == sorted(other.ring)


@pytest.mark.parametrize("members", [31, 50, 100, 200, 1000])
def test_the_reach_is_the_least_of_the_formula(members: int) -> None:
    """n Σ_{j ≥ s} C(c, j) C(n−c, w−j) / C(n, w) ≤ 2⁻⁸⁰, in whole numbers."""

    def is_enough(width: int) -> bool:
        colluding = members // 5
        ways = sum(
            comb(colluding, j) * comb(members - colluding, width - j) for j in range(two_thirds(width), width + 1)
        )
        return members * ways * 2**80 <= comb(members, width)

    assert is_enough(reach(members)) and not any(map(is_enough, range(1, reach(members))))


def connected(found: Graph, some: set[str]) -> bool:
    """Whether these are one component of the graph."""
    reached, edge = set[str](), {min(some)}
    while edge:
        reached |= edge
        edge = {other for member in edge for other in found.neighbours(member)} & some - reached
    return reached == some


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whoever_drops_out_the_honest_stay_connected(data: st.DataObject) -> None:
    """What the check of those who are left is for, against a server that chooses them."""
    found = graph(50, data.draw(st.binary(max_size=4)))
    colluding = set(data.draw(st.lists(st.sampled_from(found.members), max_size=10, unique=True)))
    start, lost = data.draw(st.integers(0, 49)), data.draw(st.integers(0, 17))
    honest = [member for member in (found.ring * 2)[start : start + 50] if member not in colluding]
    left = set(found.members) - set(honest[:lost])  # those in a row: the worst there is
    if found.holds(left):
        assert connected(found, left - colluding)
        assert len(left) >= threshold(50)


def test_a_gap_in_the_ring_is_noticed() -> None:
    found = graph(50)
    assert found.holds(found.members)
    assert found.holds(set(found.members) - set(found.ring[:4]))
    assert not found.holds(set(found.members) - set(found.ring[:5]))  # ten of fifteen in a row, and eleven are needed
    assert found.holds(set(found.members) - set(found.ring[::5]))
    assert not found.holds(found.ring[:33])


def test_two_thirds_have_an_honest_member_in_common() -> None:
    for count in range(2, 9):
        colluding = (count - 1) // 3
        groups = [set(group) for group in combinations(range(count), threshold(count))]
        assert all(len(one & other) > colluding for one in groups for other in groups)

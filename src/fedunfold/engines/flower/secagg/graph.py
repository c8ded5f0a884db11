"""Who shares masks and secrets with whom, which nobody chooses: it follows from the list of the members' keys.

The members lie on a ring in the order of SHA-256(keys, name), where `keys` is the digest of the signed list of all
their keys. Everybody has the w members on either side as neighbours, 2w in all (a Harary graph, as in Bell et al. 2020,
Secure Single-Server Aggregation with (Poly)Logarithmic Overhead). Up to 30 members all are each other's neighbours.

Members may drop out as long as of any w in a row at least s(w) are left, s(w) = ⌊2w/3⌋ + 1; everybody checks that. As
long as of any w in a row fewer than s(w) collude,

- nobody's neighbours, itself included, are s(2w+1) colluders, who could put its secrets together, and
- those who are left and do not collude stay connected, whoever the server lets drop out: a gap in the ring would have
  to be w in a row of whom all that are left collude.

Of n members let c = ⌊n/5⌋ collude. The order is random to them, so that w in a row with s(w) of them exist with a
probability of at most

    n Σ_{j ≥ s(w)} C(c, j) C(n−c, w−j) / C(n, w)

The server and colluders may try many keys, and lists that leave somebody out, for an order that suits them. With w the
least for which this is at most 2⁻⁸⁰, they succeed with a probability of at most 2⁻⁴⁰ even in 2⁴⁰ trials. It is 0 where
c < s(w).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb

from fedunfold.engines.flower.secagg.keys import digest

COMPLETE = 30
COLLUDING = 5
"""One of so many members may collude with the server, where there are more than `COMPLETE` of them."""
BITS = 80


def two_thirds(count: int) -> int:
    """⌊2n/3⌋ + 1, the least that is more than two thirds.

    Any two such groups of n have more than a third of n in common: where fewer than a third collude, an honest member.

    >>> [two_thirds(n) for n in (2, 3, 5, 6, 31)]
    [2, 3, 4, 5, 21]
    """
    return 2 * count // 3 + 1


@lru_cache(maxsize=64)
def reach(members: int) -> int:
    """w, how many neighbours a member has on either side; (n − 1)/2 or more means all others.

    >>> reach(30), reach(50), reach(1000)
    (15, 15, 99)
    """
    if members <= COMPLETE:
        return (members + 1) // 2
    width = 1
    while 2 * width + 1 < members and not _is_wide_enough(members, width):
        width += 1
    return width


def _is_wide_enough(members: int, width: int) -> bool:
    """Whether w in a row with s(w) colluders are unlikely enough."""
    colluding, ways, allowed = members // COLLUDING, 0, comb(members, width)
    for j in range(two_thirds(width), min(colluding, width) + 1):
        ways += comb(colluding, j) * comb(members - colluding, width - j)
        if members * ways << BITS > allowed:
            return False
    return True


@dataclass(frozen=True)
class Graph:
    """The members of a sum and who of them are neighbours.

    Attributes:
        members: Their ids.
        keys: The digest of the list of their keys.
    """

    members: tuple[str, ...]
    keys: bytes

    @cached_property
    def ring(self) -> tuple[str, ...]:
        """The members in the order they lie in."""
        return tuple(sorted(self.members, key=lambda member: digest("ring", self.keys, member)))

    @cached_property
    def _position(self) -> dict[str, int]:
        return {member: i for i, member in enumerate(self.ring)}

    @property
    def is_complete(self) -> bool:
        """Whether all are each other's neighbours."""
        return 2 * reach(len(self.members)) + 1 >= len(self.members)

    def holders(self, member: str) -> tuple[str, ...]:
        """Who gets a share of a member's secrets: its neighbours and itself, in the order of their ids."""
        if self.is_complete:
            return tuple(sorted(self.members))
        width, at = reach(len(self.members)), self._position[member]
        return tuple(sorted(self.ring[(at + i) % len(self.ring)] for i in range(-width, width + 1)))

    def neighbours(self, member: str) -> tuple[str, ...]:
        """Who has masks in common with a member, in the order of their ids."""
        return tuple(other for other in self.holders(member) if other != member)

    def holds(self, left: Collection[str]) -> bool:
        """Whether enough members are left, in all and of any w in a row."""
        found, count = set(left), len(self.members)
        if len(found) < two_thirds(count):
            return False
        if self.is_complete:
            return True
        width = reach(count)
        present = [member in found for member in self.ring]
        here, least = sum(present[:width]), two_thirds(width)
        for i in range(count):
            if here < least:
                return False
            here += present[(i + width) % count] - present[i]
        return True

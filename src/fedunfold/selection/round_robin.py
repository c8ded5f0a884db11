"""Round-robin: one after the other."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients


@CLIENT_SAMPLERS.register("round-robin")
@dataclass(frozen=True)
class RoundRobin(ClientSampler):
    """The clients in the order of their names, C in each round, and from the front again.

        cohort^(t) = {t C, t C + 1, …, t C + C − 1} mod K

    Nothing is drawn: after ⌈K/C⌉ rounds everybody has been in a cohort, and every client is in one as often as any
    other, up to one round. For few clients that shall all be heard alike, and for cohorts that are the same in every
    trial. Its cohorts have no probabilities.

    >>> known = KnownClients(1, ("dan", "ann", "cleo", "bob", "eve"), np.array([9, 9, 9, 9, 9]))
    >>> RoundRobin().sample(np.zeros(5), known, count=3).tolist()  # ann, bob and cleo were in round 0
    [0, 4, 1]
    """

    name: ClassVar[str] = "round-robin"

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """Whose turn it is."""
        order = np.argsort(np.array(known.client_ids))
        return order[(known.round * count + np.arange(count)) % len(order)]

"""Uniform sampling."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients


@CLIENT_SAMPLERS.register("uniform")
@dataclass(frozen=True)
class Uniform(ClientSampler):
    """C of K clients, each set of C as likely as any other: π_k = C/K.

    >>> known = KnownClients(0, ("ann", "bob", "cleo"), np.array([10, 10, 10]))
    >>> Uniform().sample(np.array([0.7, 0.1, 0.4]), known, count=2).tolist()
    [1, 2]
    """

    name: ClassVar[str] = "uniform"

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """The clients with the lowest tickets."""
        return np.argsort(tickets)[:count]

    def inclusion(self, known: KnownClients, count: int) -> np.ndarray:
        """C/K each."""
        return np.full(len(known.client_ids), count / len(known.client_ids))

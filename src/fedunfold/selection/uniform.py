"""Uniform sampling."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler


@CLIENT_SAMPLERS.register("uniform")
@dataclass(frozen=True)
class Uniform(ClientSampler):
    """C of K clients, each set of C as likely as any other.

    >>> Uniform().sample(np.array([0.7, 0.1, 0.4]), np.array([10, 10, 10]), count=2).tolist()
    [1, 2]
    """

    name: ClassVar[str] = "uniform"

    def sample(self, tickets: np.ndarray, num_examples: np.ndarray, count: int) -> np.ndarray:
        """The clients with the lowest tickets."""
        return np.argsort(tickets)[:count]

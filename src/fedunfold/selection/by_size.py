"""Sampling by the number of samples."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients
from fedunfold.selection.systematic import inclusion_probabilities, systematic_sample


@CLIENT_SAMPLERS.register("by-size")
@dataclass(frozen=True)
class BySize(ClientSampler):
    """Clients are the likelier the more data they have.

        π_k = min(1, γ N_k),   Σ_k π_k = C

    With the rule `unbiased` the step is then 1, and all clients of a cohort count the same but those that are in every
    one. For federations in which a few clients hold most of the data.

    Reference: Li et al. 2020, On the Convergence of FedAvg on Non-IID Data (scheme I draws by size with replacement;
    here nobody is drawn twice).

    >>> known = KnownClients(0, ("ann", "bob", "cleo"), np.array([10, 30, 60]))
    >>> BySize().inclusion(known, count=2).tolist()
    [0.25, 0.75, 1.0]
    >>> BySize().sample(np.array([0.6, 0.3, 0.4]), known, count=2).tolist()
    [1, 2]
    """

    name: ClassVar[str] = "by-size"

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """A systematic sample."""
        return systematic_sample(self.inclusion(known, count), tickets)

    def inclusion(self, known: KnownClients, count: int) -> np.ndarray:
        """∝ N_k."""
        return inclusion_probabilities(known.num_examples, count)

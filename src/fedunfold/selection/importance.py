"""Sampling by the norm of updates."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.messages import Metric
from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients
from fedunfold.selection.systematic import inclusion_probabilities, systematic_sample


@CLIENT_SAMPLERS.register("importance")
@dataclass(frozen=True)
class Importance(ClientSampler):
    """Clients are the likelier the larger their last update was.

        π_k = min(1, γ ‖Δ_k‖),   Σ_k π_k = C

    with the norm of the update that client k sent when it participated last, and the mean of the known ones for a
    client that has not yet; before any is known all are alike. A client whose last update was 0 is left out while
    enough others move.

    For many clients of which few still have something to learn. It favours clients that train long, so use it with the
    rule `unbiased`, which takes out again what the sampling puts in, or with a local optimiser that evens out the
    steps, such as nova. The server gets to know every client's norm.

    Reference: Chen, Horváth and Richtárik 2022, Optimal Client Sampling for Federated Learning. Theirs asks all clients
    for the norms of the round, and multiplies them by p_k; here the last known ones stand for them.

    >>> known = KnownClients(3, ("ann", "bob", "cleo"), np.array([9, 9, 9]), {"norm": np.array([0.5, 1.5, np.nan])})
    >>> Importance().inclusion(known, count=1).round(3).tolist()  # nobody knows cleo's norm yet; it counts as 1
    [0.167, 0.5, 0.333]
    """

    name: ClassVar[str] = "importance"
    required_metrics: ClassVar[frozenset[Metric]] = frozenset({"norm"})

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """A systematic sample."""
        return systematic_sample(self.inclusion(known, count), tickets)

    def inclusion(self, known: KnownClients, count: int) -> np.ndarray:
        """∝ the last known norm."""
        norms = known.metrics["norm"]
        seen = norms[np.isfinite(norms)]
        return inclusion_probabilities(np.where(np.isfinite(norms), norms, seen.mean() if len(seen) else 1.0), count)

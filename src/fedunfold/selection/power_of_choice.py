"""Power-of-choice: the worst served of some candidates."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.messages import Metric
from fedunfold.core.parts import CLIENT_SAMPLERS, ClientSampler, KnownClients


@CLIENT_SAMPLERS.register("power-of-choice")
@dataclass(frozen=True)
class PowerOfChoice(ClientSampler):
    """Draw d candidates by size, and take the C of them with the largest losses.

        A = d of K clients, drawn one after the other ∝ N_k without replacement
        cohort = the C clients of A with the largest F_k

    F_k is the mean loss on client k's data at the model it got when it participated last. A client that has not yet
    counts as having the largest loss of all, so that everybody is tried. With d = C it is sampling by size; the larger
    d, the faster the worst served are helped, and the more the average is biased towards them. There are no inclusion
    probabilities that weights could make up for.

    For many clients with unlike data, early in training or where the worst served matter most. Clients evaluate the
    model before they train, which costs about a third of an epoch.

    Attributes:
        candidates: d, at least C; 0, the default, for 2 C.

    Reference: Cho, Wang and Joshi 2022, Towards Understanding Biased Client Selection in Federated Learning (this is
    their variant π_rpow-d, where losses are the last known ones, with the loss at w^(t) in the place of the mean
    along local training).

    >>> losses = np.array([0.2, 0.9, np.nan, 0.4])
    >>> known = KnownClients(1, ("ann", "bob", "cleo", "dan"), np.array([10, 10, 10, 10]), {"start_loss": losses})
    >>> PowerOfChoice(candidates=3).sample(np.array([0.1, 0.9, 0.3, 0.2]), known, count=2).tolist()  # not bob
    [2, 3]
    """

    name: ClassVar[str] = "power-of-choice"
    required_metrics: ClassVar[frozenset[Metric]] = frozenset({"start_loss"})
    candidates: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.candidates, int) and self.candidates >= 0):
            raise InputError(f"power-of-choice needs a whole number of candidates >= 0, not {self.candidates!r}.")

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        """Of the candidates those with the largest losses; among equals who was drawn first."""
        number = self.candidates or 2 * count
        if number < count:
            raise InputError(
                f"round {known.round}: client sampler power-of-choice has {number} candidates for a cohort of {count}; "
                f"give it at least {count}, or leave candidates out for {2 * count}."
            )
        # The first d of K clocks that ring at rate N_k are d draws ∝ N_k without replacement.
        drawn = np.argsort(-np.log1p(-tickets) / known.num_examples)[:number]
        losses = known.metrics["start_loss"][drawn]
        return drawn[np.argsort(-np.where(np.isfinite(losses), losses, np.inf), kind="stable")[:count]]

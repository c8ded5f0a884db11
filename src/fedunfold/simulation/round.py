"""One round on its way through the engine: what is settled before it, who is under way, and what it brings."""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedunfold.federation import RoundRequest
from fedunfold.losses import OuterLoss
from fedunfold.simulation.schedule import Draw, Share
from fedunfold.simulation.walk import Tally


@dataclass(frozen=True)
class Round:
    """What is settled before anybody trains; arrays are over all K clients.

    `inside` is c_k in the loop, `after` the factor on w_k − w^(t) after it.
    """

    request: RoundRequest
    draw: Draw
    shares: list[Share]
    present: np.ndarray
    steps: np.ndarray
    inside: np.ndarray
    after: np.ndarray

    @property
    def there(self) -> np.ndarray:
        return np.flatnonzero(self.present)

    def walks(self, clients: np.ndarray) -> list[tuple[Draw, Share]]:
        """What each of some clients draws by, and its share."""
        return [(self.draw, self.shares[k]) for k in clients]

    @property
    def away(self) -> np.ndarray:
        return np.flatnonzero(~self.present)

    def of(self, kept: Tensor) -> "Round":
        """The same, where of the present clients only these [P] are left."""
        present = self.present.copy()
        present[self.there] = kept.numpy()
        return replace(self, present=present)

    def client_factors(self, outer: OuterLoss) -> np.ndarray:
        """1/E_k where the outer loss counts a client once, else 1."""
        epochs = np.array([share.epochs for share in self.shares], dtype=np.float64)
        return 1 / epochs if outer.per_epoch else np.ones(len(epochs))


@dataclass(frozen=True)
class Launched:
    """A round's present clients under way: their lanes among all that walk, with the models [L, d] and sums of all."""

    lanes: np.ndarray
    models: Tensor
    tally: Tally


@dataclass
class Findings:
    """What a round brings, filled in by the clients who are there and those who are away.

    `absent_loss`, the part of these in the outer loss, may still be on its way.
    """

    loss: np.ndarray
    start_loss: np.ndarray
    accuracy: np.ndarray
    updates: Tensor
    gradients: Tensor
    outer_loss: float = 0.0
    absent_loss: Tensor | None = None
    outer_gradients: list[Tensor] = field(default_factory=list)
    own_outer_loss: Tensor | None = None
    own_outer_gradients: Tensor | None = None

    @classmethod
    def none(cls, clients: int, model: Tensor) -> "Findings":
        unknown, nobody = np.full(clients, np.nan), model.new_empty(0, len(model))
        return cls(unknown.copy(), unknown.copy(), unknown.copy(), nobody, nobody)

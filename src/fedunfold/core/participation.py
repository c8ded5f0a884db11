"""Who takes part in a round: first the cohort is sampled, then it turns out who of it can be reached.

All of it is a pure function of (seed, run, round, client id, epoch): the order in which clients are listed does not
matter, and a round can be repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedunfold.core import rng
from fedunfold.core.errors import InputError
from fedunfold.core.parts import ClientSampler, KnownClients, Selection

if TYPE_CHECKING:
    from torch import Tensor

    from fedunfold.core.messages import Metric


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, over all K clients.

    Attributes:
        cohort: Who was sampled.
        participating: Who of the cohort can be reached, and trains.
        selection: How the cohort was sampled; None where it was not by a sampler.
    """

    cohort: np.ndarray
    participating: np.ndarray
    selection: Selection | None = None

    @property
    def absent(self) -> np.ndarray:
        """Who was sampled and cannot be reached. A client that was not sampled is not absent."""
        return np.asarray(self.cohort & ~self.participating)


@dataclass(frozen=True)
class RoundRng:
    """The random decisions of one round.

    Attributes:
        seed: The environment's.
        run: The run's name.
        round: t.
    """

    seed: int
    run: str
    round: int

    def permutation(self, client_id: str, epoch: int, size: int) -> np.ndarray:
        """The order in which a client meets its samples in an epoch of this round."""
        return rng.permutation(size, self.philox_key(client_id, epoch))

    def philox_key(self, client_id: str, epoch: int) -> np.ndarray:
        """The key of the stream which this order is drawn from."""
        return rng.philox_key(self.seed, "minibatches", self.run, self.round, client_id, epoch)

    def noise_seed(self, client_id: str, step: int) -> int:
        """A seed for what a model draws itself in a step of a client, such as dropout."""
        return rng.integer(self.seed, "dropout", self.run, self.round, client_id, step)

    def participation(
        self,
        client_ids: Sequence[str],
        probabilities: Sequence[float] | np.ndarray,
        num_examples: np.ndarray,
        clients_per_round: int | None,
        sampler: ClientSampler,
        reported: "Mapping[Metric, Tensor] | None" = None,
    ) -> Participation:
        """Sample the cohort, then draw who of it can be reached.

        Args:
            client_ids: All K clients.
            probabilities: How likely each can be reached, if sampled.
            num_examples: N_k.
            clients_per_round: C; None where everybody is in the cohort.
            sampler: How the cohort is sampled.
            reported: What clients last reported of the sampler's metrics, [K] each; nothing in the first round.
        """
        clients = len(client_ids)
        found = reported or {}
        metrics = {
            name: np.asarray(found[name]) if name in found else np.full(clients, np.nan)
            for name in sampler.required_metrics
        }
        known = KnownClients(self.round, client_ids, num_examples, metrics)
        selection = Selection(sampler, known, clients if clients_per_round is None else clients_per_round)
        cohort = np.ones(clients, dtype=bool)
        if selection.count < clients:
            tickets = self._uniforms("sampling", client_ids)
            chosen = set(np.asarray(sampler.sample(tickets, known, selection.count)).tolist())
            if len(chosen) != selection.count or not chosen <= set(range(clients)):
                raise InputError(
                    f"round {self.round}: client sampler '{sampler.name}' must name {selection.count} different "
                    f"clients by their indices from 0 to {clients - 1}, not {sorted(chosen)}."
                )
            cohort[:] = False
            cohort[list(chosen)] = True
        likely = np.asarray(probabilities)
        reachable = cohort.copy()
        drawn = np.flatnonzero(cohort & (likely < 1))
        reachable[drawn] = self._uniforms("presence", [client_ids[k] for k in drawn.tolist()]) < likely[drawn]
        return Participation(cohort, reachable, selection)

    def _uniforms(self, purpose: str, client_ids: Sequence[str]) -> np.ndarray:
        return rng.uniforms(self.seed, purpose, (self.run, self.round), client_ids)


def epochs_at(epochs: int | Sequence[int], t: int) -> int:
    """E_k^(t) from one number for all rounds, or one a round; the final evaluation, t = T, repeats the last round's."""
    return epochs if isinstance(epochs, int) else epochs[min(t, len(epochs) - 1)]

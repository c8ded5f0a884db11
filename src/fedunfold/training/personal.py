"""The final model trained further by every client for itself, and tested on what the client held out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedunfold.config import Client
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import Broadcast
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation

Personal = int | Literal["own"]
"""E, the epochs of fine-tuning, or "own": as many as a client makes in a round."""


@dataclass(frozen=True)
class FineTuning:
    """Local fine-tuning: client k continues from w^(T) on its own rows for E epochs, and nobody aggregates.

        w_k = LocalTraining(w^(T), rows of k, E epochs)

    It is a round of local training, with the minibatches of round T, in which every client takes part and trains as if
    it were alone (no scaling to the steps of others).

    Attributes:
        federation: The clients with what they train on, all of them always there.
        held: The same clients with what they hold out.
        epochs: E, or "own".

    Reference:
        Yu, Bagdasaryan and Shmatikov, "Salvaging federated learning by local adaptation", 2020.

    >>> import fedunfold as fu
    >>> table = fu.compare(fu.environment("digits-label-skew").replace(holdout=0.2), ["fedavg"], trials=1, personal=1)
    >>> sorted(table.methods[0].fine_tuned)
    ['site-a', 'site-b', 'site-c', 'site-d', 'site-e']
    """

    federation: SimulatedFederation
    held: SimulatedFederation
    epochs: Personal

    @classmethod
    def of(cls, federation: SimulatedFederation, held: SimulatedFederation | None, epochs: Personal) -> "FineTuning":
        """That of a federation; refused where clients hold out nothing.

        Args:
            federation: Who trains.
            held: The same clients with what they hold out, if they do.
            epochs: E, or "own".
        """
        if epochs != "own" and not (isinstance(epochs, int) and not isinstance(epochs, bool) and epochs >= 0):
            raise InputError(f"fine-tuning makes a number of epochs from 0, or the clients' 'own', not {epochs!r}.")
        if held is None:
            raise InputError(
                "fine-tuned models are tested on rows that the clients hold out, and these hold out none; "
                "set the environment's holdout, as in holdout=0.2."
            )
        env = federation.environment
        clients = tuple(
            Client(key=own.key, epochs=own.epochs if epochs == "own" else max(1, epochs)) for own in env.clients
        )
        everybody = env.replace(clients=clients, clients_per_round=None, clock=None)
        return cls(federation.over(everybody, federation.data), held, epochs)

    def models(self, result: RunResult, run: str, algorithm: Algorithm) -> Tensor:
        """The clients' own models [K, d]; NaN for one whose training left the finite numbers.

        Args:
            result: The run that ended with w^(T).
            run: Names its randomness.
            algorithm: Has the local optimiser.
        """
        models = result.client_models.clone(memory_format=torch.contiguous_format)
        if self.epochs == 0:
            return models
        t, alone = len(result.evaluations), Broadcast()
        (found,) = self.federation.train([algorithm.request(run, t, result.model, broadcast=alone, own=result.own)])
        clients = found.updates.clients
        models[clients.to(models.device)] += found.updates.rows
        if result.own is not None and found.metrics.own is not None:
            models = result.own.trained(clients.tolist(), found.metrics.own).put(models, range(len(models)))
        models[~found.participated.to(models.device)] = torch.nan
        return models

    def scores(self, result: RunResult, run: str, algorithm: Algorithm) -> dict[str, float]:
        """The primary metric of `models` on what each client held out, by client; NaN where there is no model."""
        models = self.models(result, run, algorithm)
        known = models.isfinite().all(1).cpu()
        found = torch.where(known, self.held.client_accuracies(models.nan_to_num()), torch.nan)
        return dict(zip(self.held.data.keys, found.tolist(), strict=True))

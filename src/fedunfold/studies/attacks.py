"""Clients that attack a federation: what the study of attacks runs against.

| kind  | the last `bad` clients                                                                   |
|-------|------------------------------------------------------------------------------------------|
| flip  | train on y' = C − 1 − y, all their labels mixed up in the same way; they follow the rules |
| noise | train, and send a random direction with 10 times the norm of their update                 |

Neither lies about its losses: a flipping client's are those of its wrong labels, a noisy one's those of its training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, OpenUpdates, TrainRequest
from fedunfold.core.rng import generator
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation import SimulatedFederation

TIMES = 10.0


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes:
        kind: Which of the table.
        bad: By how many clients.
    """

    kind: Literal["flip", "noise"]
    bad: int

    @property
    def name(self) -> str:
        """For names of cases."""
        return f"{self.kind}-{self.bad}"

    def clients(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Which of these clients are bad."""
        if not 0 < self.bad < len(keys):
            raise InputError(f"an attack is by 1 to {len(keys) - 1} of {len(keys)} clients, not by {self.bad}.")
        return tuple(keys[-self.bad :])

    def spoiled(self, data: FederatedData) -> FederatedData:
        """What clients train on."""
        if self.kind == "noise":
            return data
        first = data.offsets[len(data.keys) - len(self.clients(data.keys))]
        return replace(data, y=torch.cat([data.y[:first], data.classes - 1 - data.y[first:]]))

    def federation(self, environment: Environment, data: FederatedData, **settings: Any) -> SimulatedFederation:
        """The clients of an environment, the bad ones among them."""
        if self.kind == "flip":
            return SimulatedFederation(environment, data, **settings)
        return NoisyFederation(environment, data, noisy=self.clients(data.keys), **settings)


class NoisyFederation(SimulatedFederation):
    """A simulation in which some clients send noise in place of their update.

    Args:
        environment: The environment.
        data: What its clients hold.
        noisy: Those that send noise.
        settings: As of `SimulatedFederation`.
    """

    def __init__(self, environment: Environment, data: FederatedData, *, noisy: Sequence[str], **settings: Any) -> None:
        super().__init__(environment, data, **settings)
        self._noisy = frozenset(noisy)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        return [self._with_noise(*pair) for pair in zip(requests, super().train(requests), strict=True)]

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        raise InputError("noise has no gradient: learn with the first_order adjoint where clients send it.")

    def _with_noise(self, request: TrainRequest, report: ClientUpdates) -> ClientUpdates:
        rows, clients = report.updates.rows.clone(), report.updates.clients
        for row, k in zip(rows, clients.tolist(), strict=True):
            if (key := report.client_ids[k]) in self._noisy:
                stream = generator(self.environment.seed, "attack", request.run, request.round, key)
                noise = torch.from_numpy(stream.normal(size=len(row))).to(row)
                row.copy_(TIMES * row.norm() * noise / noise.norm())
        return replace(report, updates=OpenUpdates(clients, rows))

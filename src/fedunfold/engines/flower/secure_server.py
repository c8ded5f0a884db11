"""The `Federation` contract where the server sees sums of vectors and single numbers, never one client's vector.

| what            | open                          | private                                        |
|-----------------|-------------------------------|------------------------------------------------|
| aggregation     | Δ_k, from which Σ_k Θ_k Δ_k     | the secure sum Σ_k Θ_k Δ_k                     |
| gradient of Θ   | ⟨λ, Δ_k⟩ from the Δ_k it has    | the numbers ⟨λ, Δ_k⟩, by the clients            |
| adjoint         | every client's part           | their secure sum                               |
| outer gradients | every client's                | their secure sum                               |

Clients make the round again from its seed whenever they are asked about it, and keep nothing of it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.federation import ClientUpdates, Evaluation, HiddenSum, OuterLossResult, TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.engines.flower.schema import ClientReply, checked
from fedunfold.engines.flower.secagg.server import Exchange, SecureSum, Summed, SumTerm
from fedunfold.engines.flower.server import Channel, RemoteFederation

log = logging.getLogger("fedunfold")

Task = tuple[Literal["train", "backprop", "outer"], str]
"""Which verb a client follows, and which array of its answer it adds to a sum."""
OUTER_GRADIENT: Task = ("train", "outer_gradient")


class SecureChannel(Channel, Protocol):
    """A channel that also carries the letters of a secure sum."""

    @property
    def exchange(self) -> Exchange: ...


class PrivateFederation(RemoteFederation):
    """Clients behind a channel, of whose vectors the server learns sums only (docs/secure.md).

    The rule and the algorithm must do with that: no gradients of single clients, as fedadp needs them, no `remember`,
    no screening by norm and no aggregation but the mean. What is screened are the numbers clients tell. A client that
    is lost while a sum is made counts as absent; with fewer than a majority left there is no sum, and the run stops.
    """

    def __init__(
        self,
        channel: SecureChannel,
        environment: Environment,
        model: ModelFactory,
        evaluate: Callable[[Tensor], Evaluation] | None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(channel, environment, model, evaluate, dtype=dtype)
        self._exchange = channel.exchange
        # By run and round: absent clients whose outer loss has been counted, and whose gradient is still to come.
        self._told: dict[tuple[str, int], list[str]] = {}

    def train(self, request: TrainRequest) -> ClientUpdates:
        _refuse_single_vectors(request)
        drawn = self._present(request)
        asked = self._asked(request, drawn)
        outer, gradient = self._outer_along_the_way(request), None
        answers: Mapping[str, ClientReply]
        refused: dict[str, str] = {}
        if outer and request.path_gradient and asked:
            found = self._summed(request, dict.fromkeys(asked, OUTER_GRADIENT), drawn)
            answers, gradient = found.replies, self._vector(found)
        else:
            answers = self._ask("measure", request, asked, present=drawn, refused=refused)
        report = self._merged(request, drawn, answers, refused)
        if outer and not request.path_gradient:
            away = [key for key, is_there in zip(self._keys, drawn, strict=True) if not is_there and key in answers]
            if bool(report.present.any()):
                # In one sum with the others' part of the adjoint: few are away, and a sum of few hides little.
                self._told[request.run, request.round] = away
            elif away:
                gradient = self._vector(self._summed(request, dict.fromkeys(away, OUTER_GRADIENT), drawn))
        hidden = PrivateUpdates(self, _plain(request), report.present)
        return replace(report, outer_gradient=gradient, hidden=hidden)

    def backprop(self, request: TrainRequest, present: Tensor, adjoints: Tensor) -> Tensor:
        there = [key for key, is_there in zip(self._keys, present.tolist(), strict=True) if is_there]
        away = self._told.pop((request.run, request.round), ())
        tasks: dict[str, Task] = dict.fromkeys(there, ("backprop", "adjoint"))
        tasks |= dict.fromkeys(away, OUTER_GRADIENT)
        rows = dict(zip(there, adjoints, strict=True))
        found = self._summed(request, tasks, self._present(request), adjoints=rows)
        if missing := [key for key in tasks if key not in found.replies]:
            log.warning("round %d: the adjoint goes on without %s", request.round, ", ".join(missing))
        return self._vector(found)

    def outer(self, request: TrainRequest) -> OuterLossResult:
        tasks: dict[str, Task] = dict.fromkeys(self._keys, ("outer", "gradient"))
        found = self._summed(request, tasks, np.ones(len(self._keys), dtype=bool))
        return OuterLossResult(
            sum(reply.metrics["outer_loss"] for reply in found.replies.values()), self._vector(found)
        )

    def weighted_updates(self, request: TrainRequest, keys: Sequence[str], weights: Sequence[float]) -> Summed:
        """Σ_k c_k (w_k − w^(t)) over these clients, or those of them that get through."""
        tasks: dict[str, Task] = dict.fromkeys(keys, ("train", "updates"))
        return self._summed(request, tasks, self._present(request), weights=dict(zip(keys, weights, strict=True)))

    def inner_products(self, request: TrainRequest, keys: Sequence[str], vector: Tensor) -> dict[str, float]:
        """⟨v, w_k − w^(t)⟩ of those of these clients that answer."""
        adjoints = dict.fromkeys(keys, vector)
        answers = self._ask("inner", request, keys, present=self._present(request), adjoints=adjoints)
        return {key: answer.metrics["inner"] for key, answer in answers.items()}

    # --- sums --------------------------------------------------------------------------------------------

    def _summed(
        self,
        request: TrainRequest,
        tasks: Mapping[str, Task],
        present: np.ndarray,
        *,
        weights: Mapping[str, float] | None = None,
        adjoints: Mapping[str, Tensor] | None = None,
    ) -> Summed:
        """The sum over clients of what each is to compute, and to weigh."""
        masked = {"masked": torch.empty(len(request.model), dtype=torch.int64)}
        messages = self._messages(request, list(tasks), present, adjoints)
        parts = {}
        for key, (verb, array) in tasks.items():
            assignment, arrays = messages[key]
            _, numbers, unasked = self._expected(verb, request, assignment)

            def check(reply: ClientReply, numbers: set[str] = numbers, unasked: set[str] = unasked) -> ClientReply:
                return checked(reply, masked, numbers, unasked)

            parts[key] = SumTerm(verb, array, assignment, arrays, check, 1.0 if weights is None else weights[key])
        return SecureSum(self._exchange, self.faults, f"round {request.round}").of(parts)

    def _vector(self, found: Summed) -> Tensor:
        return torch.from_numpy(found.total).to(self._dtype)


@dataclass(frozen=True)
class PrivateUpdates:
    """A round's updates, which stay with the clients."""

    federation: PrivateFederation
    request: TrainRequest
    present: Tensor

    def weighted_sum(self, coefficients: Tensor) -> HiddenSum:
        clients = torch.nonzero(self.present).flatten()
        nothing = torch.zeros_like(self.request.model)
        if not len(clients):
            return PrivateSum(self, clients, coefficients[clients], nothing)
        keys = self.keys(clients)
        found = self.federation.weighted_updates(self.request, keys, coefficients[clients].tolist())
        entered = torch.tensor([key in found.replies for key in keys])
        total = torch.from_numpy(found.total).to(nothing)
        return PrivateSum(self, clients[entered], coefficients[clients[entered]], total)

    def keys(self, clients: Tensor) -> list[str]:
        return [self.federation.clients[k].key for k in clients.tolist()]


@dataclass(frozen=True)
class PrivateSum:
    """Σ_k c_k Δ_k over `clients`, with their c."""

    updates: PrivateUpdates
    clients: Tensor
    coefficients: Tensor
    total: Tensor

    def along(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩. What clients that do not answer would have said is in the sum: Σ_k c_k ⟨v, Δ_k⟩ = ⟨v, Σ_k c_k Δ_k⟩.

        For one such client that is its own number; several count with the mean of theirs.
        """
        keys, source = self.updates.keys(self.clients), self.updates
        found = source.federation.inner_products(source.request, keys, vector) if keys else {}
        along = torch.tensor([found.get(key, 0.0) for key in keys], dtype=torch.float64)
        silent = torch.tensor([key not in found for key in keys], dtype=torch.bool)
        owed = self.coefficients[silent].sum()
        if bool(owed > 0):
            along[silent] = (float(self.total @ vector) - self.coefficients @ along) / owed
        return along


def _plain(request: TrainRequest) -> TrainRequest:
    """The same local training, with nothing reported beside the update."""
    return replace(request, needs=frozenset(), outer=None, path_gradient=False)


def _refuse_single_vectors(request: TrainRequest) -> None:
    if "gradients" in request.needs:
        raise InputError(
            "a private federation shows no gradients of single clients, which rules such as fedadp need; choose size, "
            "uniform, fixed, dr, fedfa or learned weights, or run without private."
        )
    if request.keeps_updates:
        raise InputError(
            "a private federation shows no updates of single clients, which the server keeps under 'remember'; choose "
            "keep or drop for absent clients, or run without private."
        )
    if request.compares_updates:
        raise InputError(
            "a private federation shows no updates of single clients, which the screening by norm and the aggregations "
            "median, trimmed and krum compare; choose screen 'finite' and the mean, or run without private."
        )

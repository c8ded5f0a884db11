"""The `Federation` contract where the server sees sums of vectors and single numbers, never one client's vector.

| what            | open                          | secure                                         |
|-----------------|-------------------------------|------------------------------------------------|
| aggregation     | Δ_k, from which Σ_k Θ_k Δ_k     | the secure sum Σ_k Θ_k Δ_k                     |
| gradient of Θ   | ⟨λ, Δ_k⟩ from the Δ_k it has    | the numbers ⟨λ, Δ_k⟩, by the clients            |
| adjoint         | every client's part           | their secure sum                               |
| outer gradients | every client's                | their secure sum                               |
| statistics      | every client's                | their secure sum                               |

Clients repeat the round from its seed for every message about it, and store nothing of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.messages import ClientUpdates, OuterTerms, TrainRequest
from fedunfold.core.outcomes import OuterLossResult
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.engines.flower.secagg.protocol import SummedMessage
from fedunfold.engines.flower.secagg.server import Exchange, SumProtocol, SumResult, SumTerm
from fedunfold.engines.flower.server import RemoteFederation, Transport

Term = tuple[SummedMessage, str]
"""Which message a client follows, and which array of its reply it adds to a sum."""
UPDATE: Term = ("train", "updates")
ADJOINT: Term = ("vjp", "adjoint")
OUTER_GRADIENT: Term = ("train", "outer_gradient")
FINAL_GRADIENT: Term = ("outer_loss", "gradient")
STATISTICS: Term = ("evaluate", "statistics")


class SecureTransport(Transport, Protocol):
    """A transport that also carries the messages of a secure sum."""

    @property
    def exchange(self) -> Exchange:
        """Carries a record to each of several clients, and brings back theirs."""
        ...


class SecureFederation(RemoteFederation):
    """Clients behind a transport, of whose vectors the server learns sums only (docs/secure.md).

    The rule and the algorithm must do with that: no gradients of single clients, as fedadp needs them, no `remember`,
    no filter by norm and no aggregator but the mean. What is checked are the numbers clients report. A client that
    drops out of a sum counts as absent; without more than two thirds of them there is no sum, and the run stops.

    Args:
        transport: Carries messages to the clients, those of secure sums too.
        *more: As for `RemoteFederation`.
        **named: As for `RemoteFederation`.
    """

    sums_only = True

    def __init__(self, transport: SecureTransport, *more: Any, **named: Any) -> None:
        super().__init__(transport, *more, **named)
        self._exchange = transport.exchange
        # By run and round: absent clients whose outer loss has been counted, and whose gradient is still to come.
        self._pending: dict[tuple[str, int], list[str]] = {}
        self._recorded: dict[str, int] = {}

    def weighted_updates(self, request: TrainRequest, weights: Mapping[str, float]) -> SumResult:
        """Σ_k c_k (w_k − w^(t)) over the clients that have a weight, or those of them that get through."""
        return self._sum(request, dict.fromkeys(weights, UPDATE), weights=weights)

    def inner_products(self, request: TrainRequest, client_ids: Sequence[str], vector: Tensor) -> dict[str, float]:
        """⟨v, w_k − w^(t)⟩ of those of these clients that answer; `FederationError` where none does."""
        adjoints = dict.fromkeys(client_ids, vector)
        replies = self._request("inner_products", request, client_ids, adjoints=adjoints)
        if not replies:
            raise FederationError(
                f"round {request.round}: no client answered with the projection of its update; the log says why. Where "
                "they have answered as many as they ever do, raise max-projections in their node-configs."
            )
        return {client_id: reply.metrics["inner_product"] for client_id, reply in replies.items()}

    def held_out_scores(self, model: Tensor) -> dict[str, float]:
        """None: how a model does at a single client is not shown."""
        return {}

    # --- one run -----------------------------------------------------------------------------------------

    def _train(self, request: TrainRequest) -> ClientUpdates:
        _refuse_single_vectors(request)
        self.task.check_metrics(request.required_metrics)
        recipients, rejected = self._recipients(request), dict[str, str]()
        along_path, gradient = request.outer_along_path is not None, None
        replies: Mapping[str, ClientReply]
        if along_path and request.path_gradient and recipients:
            found = self._sum(request, dict.fromkeys(recipients, OUTER_GRADIENT))
            replies, gradient = found.replies, self._vector(found)
        else:
            replies = self._request("measure", request, recipients, rejected=rejected)
        report = self._merge(request, replies, rejected)
        if along_path and not request.path_gradient:
            absent = self._named(self._participation(request).absent)
            absent = [client_id for client_id in absent if client_id in replies]
            if bool(report.participated.any()):
                # In one sum with the others' part of the adjoint: few are absent, and a sum of few hides little.
                self._pending[request.run, request.round] = absent
            elif absent:
                gradient = self._vector(self._sum(request, dict.fromkeys(absent, OUTER_GRADIENT)))
        # The same local training, with nothing reported beside the update.
        alone = replace(request, required_metrics=frozenset(), outer=None, path_gradient=False)
        updates = SecureUpdates(self, alone, torch.nonzero(report.participated).flatten())
        return replace(report, outer=OuterTerms(report.outer.loss, gradient), updates=updates)

    def _vjp(self, request: TrainRequest, participated: Tensor, adjoints: Tensor) -> Tensor:
        trained = self._named(participated.numpy())
        absent = self._pending.pop((request.run, request.round), [])
        terms = dict.fromkeys(trained, ADJOINT) | dict.fromkeys(absent, OUTER_GRADIENT)
        found = self._sum(request, terms, adjoints=dict(zip(trained, adjoints, strict=True)))
        self._warn_of_missing(request, list(terms), found.replies)
        return self._vector(found)

    def _outer_loss(self, request: TrainRequest) -> OuterLossResult:
        found = self._sum(request, dict.fromkeys(self._client_ids, FINAL_GRADIENT))
        loss = sum(reply.metrics["outer_loss"] for reply in found.replies.values())
        return OuterLossResult(loss, self._vector(found))

    def _statistics(self, request: TrainRequest) -> tuple[Tensor, Mapping[str, ClientReply]]:
        # Sums over rows become sums of means, of the size that a secure sum has room for.
        rows = sum(self._num_tested.values())
        terms, weights = dict.fromkeys(self._client_ids, STATISTICS), dict.fromkeys(self._client_ids, 1 / rows)
        found = self._sum(request, terms, weights=weights, length=self._num_statistics)
        return torch.from_numpy(found.total) * rows, found.replies

    # --- sums --------------------------------------------------------------------------------------------

    def _sum(
        self,
        request: TrainRequest,
        terms: Mapping[str, Term],
        *,
        weights: Mapping[str, float] | None = None,
        adjoints: Mapping[str, Tensor] | None = None,
        length: int | None = None,
    ) -> SumResult:
        """The sum over clients of what each is to compute, times its weight; of the model's length, or of another."""
        masked = {"masked": torch.empty(length or len(request.model), dtype=torch.int64)}
        # All terms of a sum belong to a round, or all to the final evaluation.
        first, _ = next(iter(terms.values()), OUTER_GRADIENT)
        messages = self._messages(first, request, list(terms), adjoints)
        parts = {}
        for client_id, (message_type, array) in terms.items():
            instruction, arrays = messages[client_id]
            expected = replace(self._expected(message_type, request, trains=instruction.trains), arrays=masked)
            weight = (weights or {}).get(client_id, 1.0)
            parts[client_id] = SumTerm(message_type, array, instruction, arrays, expected.check, weight)
        return SumProtocol(self._exchange, self.failures, f"round {request.round}", self._recorded).run(parts)

    def _vector(self, found: SumResult) -> Tensor:
        return torch.from_numpy(found.total).to(self._dtype)


@dataclass(frozen=True)
class SecureUpdates:
    """A round's updates, which stay with the clients.

    Attributes:
        federation: The clients.
        request: The round, with nothing reported beside the update.
        clients: Indices of the clients they come from, [n].
    """

    federation: SecureFederation
    request: TrainRequest
    clients: Tensor

    @property
    def rows(self) -> Tensor:
        """Refused: single updates are not revealed."""
        raise InputError(
            "secure aggregation reveals no update of a single client; use their weighted sum, or run without it."
        )

    def weighted_sum(self, coefficients: Tensor) -> "SecureSum":
        """Their sum with coefficients c [K], over those of the clients that get through."""
        clients, chosen = self.clients, coefficients[self.clients]
        total = torch.zeros_like(self.request.model)
        if len(clients):
            client_ids = self.client_ids(clients)
            weights = dict(zip(client_ids, chosen.tolist(), strict=True))
            found = self.federation.weighted_updates(self.request, weights)
            entered = torch.tensor([client_id in found.replies for client_id in client_ids])
            clients, chosen, total = clients[entered], chosen[entered], torch.from_numpy(found.total).to(total)
        return SecureSum(self, clients, chosen, total)

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩, [n], before any sum; NaN for clients that do not answer."""
        client_ids = self.client_ids(self.clients)
        found = self.federation.inner_products(self.request, client_ids, vector) if client_ids else {}
        return torch.tensor([found.get(client_id, math.nan) for client_id in client_ids], dtype=torch.float64)

    def client_ids(self, clients: Tensor) -> list[str]:
        """Ids of clients by index."""
        return [self.federation.clients[k].client_id for k in clients.tolist()]


@dataclass(frozen=True)
class SecureSum:
    """Σ_k c_k Δ_k over the clients that entered it.

    Attributes:
        updates: The updates.
        clients: Indices of the clients, [n].
        coefficients: Their c_k, [n].
        total: The sum, [d].
    """

    updates: SecureUpdates
    clients: Tensor
    coefficients: Tensor
    total: Tensor

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, Δ_k⟩, [n].

        Those of clients that do not answer follow from the sum: Σ_k c_k ⟨v, Δ_k⟩ = ⟨v, Σ_k c_k Δ_k⟩. For one such
        client that is its own number; several count with the mean of theirs.
        """
        source, client_ids = self.updates, self.updates.client_ids(self.clients)
        found = source.federation.inner_products(source.request, client_ids, vector) if client_ids else {}
        products = torch.tensor([found.get(client_id, 0.0) for client_id in client_ids], dtype=torch.float64)
        missing = torch.tensor([client_id not in found for client_id in client_ids], dtype=torch.bool)
        weight = self.coefficients[missing].sum()
        if bool(weight > 0):
            products[missing] = (float(self.total @ vector) - self.coefficients @ products) / weight
        return products


def _refuse_single_vectors(request: TrainRequest) -> None:
    if "gradients" in request.required_metrics:
        raise InputError(
            "secure aggregation reveals no gradients of single clients, which rules such as fedadp need; choose size, "
            "uniform, fixed, dr, fedfa or learned weights, or run without it."
        )
    if request.stores_updates:
        raise InputError(
            "secure aggregation reveals no updates of single clients, which the server stores under 'remember'; choose "
            "keep or drop for absent clients, or run without it."
        )
    if request.control is not None:
        raise InputError(
            f"secure aggregation reveals one sum of a round's updates, and {request.optimizer.name} needs a second, "
            "from which single updates could be worked out; choose another local optimiser, or run without it."
        )
    if request.compares_updates:
        raise InputError(
            "secure aggregation reveals no updates of single clients, which the filter by norm, the aggregators "
            "median, trimmed-mean and krum and the server fedlws compare; choose the filter 'finite', the mean and "
            "another server, or run without it."
        )

"""What a usable reply looks like, and how the replies of a round become its `ClientUpdates`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedunfold.aggregation.screening import NOT_USABLE, is_usable
from fedunfold.core.errors import InputError
from fedunfold.core.messages import (
    ClientInfo,
    ClientMetrics,
    ClientUpdates,
    Metric,
    OpenUpdates,
    OuterTerms,
    TrainRequest,
)
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import Participation
from fedunfold.engines.flower.schema import Arrays, ClientReply, MessageType


@dataclass(frozen=True)
class ExpectedReply:
    """What a client has to reply with.

    Attributes:
        arrays: Arrays of the names, shapes and types that its own must have.
        numbers: Names of its numbers.
        may_be_nan: Those of them that an absent client has no value for.
    """

    arrays: Arrays
    numbers: frozenset[str] = frozenset()
    may_be_nan: frozenset[str] = frozenset()

    def check(self, reply: ClientReply) -> ClientReply:
        """The reply, if it has exactly these arrays and numbers, and all of them are possible."""
        if set(reply.arrays) != set(self.arrays):
            raise InputError(f"has arrays {_names(reply.arrays)} in place of {_names(self.arrays)}")
        for name, like in self.arrays.items():
            array = reply.arrays[name]
            if array.shape != like.shape or array.dtype != like.dtype:
                raise InputError(f"has '{name}' of shape {list(array.shape)} and type {array.dtype}, not as the model")
            if like.is_floating_point() and not is_usable(array[None]):
                raise InputError(f"{NOT_USABLE} in '{name}'")
        if set(reply.metrics) != self.numbers:
            raise InputError(f"has numbers {_names(reply.metrics)} in place of {_names(self.numbers)}")
        for name, value in reply.metrics.items():
            if not (is_possible(name, value) or (name in self.may_be_nan and math.isnan(value))):
                raise InputError(f"has {value} for '{name}'")
        return reply


def expected_reply(message_type: MessageType, request: TrainRequest, *, trains: bool) -> ExpectedReply:
    """What a client has to reply with.

    Args:
        message_type: What it was sent.
        request: What is requested of the round.
        trains: Whether it trains in it, or counts as absent.
    """
    vector = request.model
    if message_type == "vjp":
        return ExpectedReply({"adjoint": vector})
    if message_type == "evaluate":
        return ExpectedReply({}, frozenset({"loss", "accuracy"}))
    if message_type == "outer_loss":
        return ExpectedReply({"gradient": vector}, frozenset({"outer_loss"}))
    if message_type == "inner_products":
        return ExpectedReply({}, frozenset({"inner_product"}))
    arrays = {}
    if trains:
        arrays["updates"] = vector
        if "gradients" in request.required_metrics:
            arrays["gradients"] = vector
    if request.outer_along_path is not None and (request.path_gradient or not trains):
        arrays["outer_gradient"] = vector
    numbers = frozenset({"outer_loss", *request.required_metrics}) - {"gradients"}
    return ExpectedReply(
        {} if message_type == "measure" else arrays, numbers, frozenset() if trains else frozenset({"accuracy"})
    )


def is_possible(name: str, value: float) -> bool:
    """Whether a client can mean it: losses are not negative, an accuracy lies between 0 and 1, all are finite."""
    lowest = -math.inf if name == "inner_product" else 0
    return math.isfinite(value) and lowest <= value <= (1 if name == "accuracy" else math.inf)


def merge_replies(
    request: TrainRequest,
    clients: Sequence[ClientInfo],
    participation: Participation,
    num_steps: np.ndarray,
    replies: Mapping[str, ClientReply],
    rejected: Mapping[str, str],
    layout: ParamLayout,
) -> ClientUpdates:
    """The updates of a round: those who were to participate and replied did.

    Args:
        request: What was requested of the round.
        clients: All K clients.
        participation: Who was sampled, and who of these was to train.
        num_steps: τ_k of each client that trains, [K].
        replies: By client.
        rejected: Whose replies were rejected, and why.
        layout: What the entries of a model are.
    """
    client_ids = tuple(client.client_id for client in clients)
    participated = participation.participating & np.array([client_id in replies for client_id in client_ids])
    trained = [client_ids[k] for k in np.flatnonzero(participated)]
    numbers = {client_id: reply.metrics for client_id, reply in replies.items()}

    def rows(name: str) -> Tensor:
        found = [replies[key].arrays[name] for key in trained if name in replies[key].arrays]
        return torch.stack(found) if found else request.model.new_empty(0, len(request.model))

    return ClientUpdates(
        round=request.round,
        client_ids=client_ids,
        num_examples=torch.tensor([client.num_examples for client in clients], dtype=torch.float64),
        participated=torch.from_numpy(participated),
        num_steps=torch.from_numpy(np.where(participated, num_steps, 0)),
        updates=OpenUpdates(torch.from_numpy(np.flatnonzero(participated)), rows("updates")),
        cohort=torch.from_numpy(participation.cohort),
        metrics=client_metrics(request.required_metrics, client_ids, numbers, rows("gradients")),
        outer=_outer_terms(request, replies, trained),
        layout=layout,
        rejected=rejected,
    )


def client_metrics(
    required: frozenset[Metric],
    client_ids: Sequence[str],
    numbers: Mapping[str, Mapping[str, float]],
    gradients: Tensor,
) -> ClientMetrics:
    """What clients reported beside their updates, where it is required; NaN for those who reported nothing.

    Args:
        required: What is required.
        client_ids: All K clients.
        numbers: What each reported, by client and metric.
        gradients: Sums of local gradients of those who trained, [P, d].
    """

    def column(name: Metric) -> Tensor | None:
        if name not in required:
            return None
        found = [numbers[key][name] if key in numbers else math.nan for key in client_ids]
        return torch.tensor(found, dtype=torch.float64)

    return ClientMetrics(
        column("loss"), column("start_loss"), column("accuracy"), gradients if "gradients" in required else None
    )


def _outer_terms(request: TrainRequest, replies: Mapping[str, ClientReply], trained: Sequence[str]) -> OuterTerms:
    """Where updates are compared, the terms of those who trained stay apart until it is known who is rejected."""
    apart = [replies[client_id] for client_id in trained] if request.compares_updates else []
    summed = [reply for key, reply in replies.items() if not (request.compares_updates and key in trained)]

    def gradients(some: Sequence[ClientReply]) -> Tensor | None:
        found = [reply.arrays["outer_gradient"] for reply in some if "outer_gradient" in reply.arrays]
        return torch.stack(found) if found else None

    own, others = gradients(apart), gradients(summed)
    return OuterTerms(
        sum(reply.metrics["outer_loss"] for reply in summed),
        None if others is None else others.sum(0),
        torch.tensor([reply.metrics["outer_loss"] for reply in apart], dtype=torch.float64) if apart else None,
        own,
    )


def sum_vectors(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Their sum; zeros as in `like` where there are none."""
    return torch.stack(list(vectors)).sum(0) if vectors else torch.zeros_like(like)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"

"""What a usable reply looks like, and how the replies of a round become its `ClientUpdates`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

from fedunfold.aggregation.screening import NOT_USABLE, is_usable
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientMetrics, ClientUpdates, Metric, OpenUpdates, OuterTerms, TrainRequest
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import Participation
from fedunfold.engines.flower.control import LOST
from fedunfold.engines.flower.model_arrays import ModelArrays
from fedunfold.engines.flower.schema import Arrays, ClientReply, MessageType
from fedunfold.io.limits import CLIENT_SAMPLES

FIXED: Mapping[MessageType, tuple[tuple[str, ...], frozenset[str]]] = {
    "vjp": (("adjoint",), frozenset()),
    "outer_loss": (("gradient",), frozenset({"outer_loss"})),
    "inner_products": ((), frozenset({"inner_product"})),
}
"""Arrays and numbers of replies that have the same ones whatever the round requires."""


@dataclass(frozen=True)
class ExpectedReply:
    """What a client has to reply with.

    Attributes:
        arrays: Arrays of the names, shapes and types that its own must have.
        numbers: Names of its numbers.
        may_be_nan: Those of them that an absent client has no value for.
        least_loss: What a loss is never below.
    """

    arrays: Arrays
    numbers: frozenset[str] = frozenset()
    may_be_nan: frozenset[str] = frozenset()
    least_loss: float = 0.0

    def check(self, reply: ClientReply) -> ClientReply:
        """The reply, if it has exactly these arrays and numbers, and all of them are possible."""
        if set(reply.arrays) != set(self.arrays):
            raise InputError(f"has arrays {_names(reply.arrays)} in place of {_names(self.arrays)}")
        for name, like in self.arrays.items():
            array = reply.arrays[name]
            if array.shape != like.shape or array.dtype != like.dtype:
                raise InputError(
                    f"has '{name}' of shape {list(array.shape)} and type {array.dtype} in place of {list(like.shape)} "
                    f"and {like.dtype}"
                )
            if like.is_floating_point() and not is_usable(array[None]):
                raise InputError(f"{NOT_USABLE} in '{name}'")
        if set(reply.metrics) != self.numbers:
            raise InputError(f"has numbers {_names(reply.metrics)} in place of {_names(self.numbers)}")
        for name, value in reply.metrics.items():
            if not (is_possible(name, value, self.least_loss) or (name in self.may_be_nan and math.isnan(value))):
                raise InputError(f"has {value} for '{name}'")
        return reply


def expected_reply(
    message_type: MessageType,
    request: TrainRequest,
    *,
    trains: bool,
    least_loss: float = 0.0,
    num_statistics: int = 0,
) -> ExpectedReply:
    """What a client has to reply with.

    Args:
        message_type: What it was sent.
        request: What is requested of the round.
        trains: Whether it trains in it, or counts as absent.
        least_loss: What a loss is never below.
        num_statistics: How many statistics the test of a model has.
    """
    model = request.model
    if message_type == "evaluate":
        statistics = torch.empty(num_statistics, dtype=torch.float64)
        return ExpectedReply({"statistics": statistics}, frozenset({"loss"}), least_loss=least_loss)
    if message_type in FIXED:
        fixed, numbers = FIXED[message_type]
        return ExpectedReply(dict.fromkeys(fixed, model), numbers, least_loss=least_loss)
    numbers = frozenset({"outer_loss", *request.required_metrics}) - {"gradients"}
    if request.control is not None and trains:
        numbers |= {LOST}
    may_be_nan = frozenset[str]() if trains else frozenset({"accuracy", "norm"})
    names = {"updates", *request.required_metrics & {"gradients"}} if trains else set()
    if request.outer_along_path is not None and (request.path_gradient or not trains):
        names.add("outer_gradient")
    arrays = dict.fromkeys(() if message_type == "measure" else names, model)
    return ExpectedReply(arrays, numbers, may_be_nan, least_loss)


def is_possible(name: str, value: float, least_loss: float = 0.0) -> bool:
    """Whether a client can mean it: all are finite, an accuracy lies between 0 and 1, and a loss has a lower bound."""
    lowest = {"inner_product": -math.inf, "accuracy": 0.0, "norm": 0.0}.get(name, least_loss)
    return math.isfinite(value) and lowest <= value <= (1 if name == "accuracy" else math.inf)


def merge_replies(
    request: TrainRequest,
    num_examples: Mapping[str, float],
    participation: Participation,
    replies: Mapping[str, ClientReply],
    layout: ParamLayout,
    num_steps: np.ndarray | int = 0,
    rejected: Mapping[str, str] | None = None,
    updates: OpenUpdates | None = None,
) -> ClientUpdates:
    """The updates of a round: those who were to participate and replied did.

    Args:
        request: What was requested of the round.
        num_examples: N_k of all K clients, by their ids.
        participation: Who was sampled, and who of these was to train.
        replies: By client.
        layout: What the entries of a model are.
        num_steps: τ_k of each client that trains, [K]; 0 where unknown.
        rejected: Whose replies were rejected, and why.
        updates: Those of the clients that trained, in this order, where they are not in the replies.
    """
    client_ids = tuple(num_examples)
    replied = np.array([client_id in replies for client_id in client_ids], dtype=bool)
    participated = participation.participating & replied
    clients = np.flatnonzero(participated)
    trained = [client_ids[k] for k in clients]

    def rows(name: str) -> Tensor:
        found = [replies[key].arrays[name] for key in trained if name in replies[key].arrays]
        return torch.stack(found) if found else request.model.new_empty(0, len(request.model))

    def column(name: Metric) -> Tensor | None:
        """What clients reported, where it is required; NaN for those who reported nothing."""
        if name not in request.required_metrics:
            return None
        found = [replies[key].metrics.get(name, math.nan) if key in replies else math.nan for key in client_ids]
        return torch.tensor(found, dtype=torch.float64)

    gradients = rows("gradients") if "gradients" in request.required_metrics else None
    return ClientUpdates(
        round=request.round,
        client_ids=client_ids,
        num_examples=torch.tensor(list(num_examples.values()), dtype=torch.float64),
        participated=torch.from_numpy(participated),
        num_steps=torch.from_numpy(np.where(participated, num_steps, 0)),
        updates=updates or OpenUpdates(torch.from_numpy(clients), rows("updates")),
        cohort=torch.from_numpy(participation.cohort),
        selection=participation.selection,
        metrics=ClientMetrics(column("loss"), column("start_loss"), column("accuracy"), column("norm"), gradients),
        outer=OuterTerms() if request.outer is None else _outer_terms(request, replies, trained),
        layout=layout,
        rejected=rejected or {},
        model=request.model,
    )


def _outer_terms(request: TrainRequest, replies: Mapping[str, ClientReply], trained: Sequence[str]) -> OuterTerms:
    """Where updates are compared, the terms of those who trained stay apart until it is known who is rejected."""
    apart = [replies[client_id] for client_id in trained] if request.compares_updates else []
    summed = [reply for key, reply in replies.items() if not (request.compares_updates and key in trained)]

    def gradients(some: Sequence[ClientReply]) -> Tensor | None:
        found = [reply.arrays["outer_gradient"] for reply in some if "outer_gradient" in reply.arrays]
        return torch.stack(found) if found else None

    losses, others = [reply.metrics["outer_loss"] for reply in apart], gradients(summed)
    return OuterTerms(
        sum(reply.metrics["outer_loss"] for reply in summed),
        None if others is None else others.sum(0),
        torch.tensor(losses, dtype=torch.float64) if losses else None,
        gradients(apart),
    )


@dataclass(frozen=True)
class Update:
    """What a strategy can use of a train reply.

    Attributes:
        arrays: w_k.
        metrics: What the rule reads.
        num_steps: τ_k; 0 where it is not reported.
        content: All of the reply, for the means of metrics.
        num_examples: N_k, as it says.
    """

    arrays: ModelArrays
    metrics: Mapping[str, float]
    num_steps: int
    content: RecordDict
    num_examples: float


def read_content(message: Message, weighted_by: str) -> tuple[RecordDict, MetricRecord, float]:
    """The reply of an ordinary Flower client.

    Args:
        message: The reply.
        weighted_by: The metric that says how many examples it stands for.

    Returns:
        Its content, its metrics, and that number.
    """
    if message.has_error():
        raise InputError(f"failed: {message.error.reason}")
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        raise InputError(f"has {len(records)} metric records in place of one")
    count = records[0].get(weighted_by)
    if not (isinstance(count, int | float) and 0 <= count < math.inf):
        raise InputError(f"reports {count!r} examples ('{weighted_by}')")
    CLIENT_SAMPLES.check(int(count), f"reports too many examples ('{weighted_by}'): ")
    return message.content, records[0], count


def mean_metrics(
    contents: Sequence[RecordDict], weighted_by: str, aggregate: Callable[[list[RecordDict], str], MetricRecord]
) -> MetricRecord | None:
    """A Flower strategy's mean of what clients report, over the metrics that all of them have alike.

    Args:
        contents: Replies, each with one metric record.
        weighted_by: The metric that says how much a reply counts.
        aggregate: The strategy's function; it gets the replies as they are where all have the same metrics.

    Returns:
        None where there are no replies, or where Flower's own mean has none that counts.
    """
    records = [next(iter(content.metric_records.values())) for content in contents]
    if not records or (aggregate is aggregate_metricrecords and not any(record[weighted_by] for record in records)):
        return None
    first, *others = ({name: np.shape(value) for name, value in record.items()} for record in records)
    if any(other != first for other in others):
        alike = [name for name, shape in first.items() if all(other.get(name) == shape for other in others)]
        contents = [RecordDict({"metrics": MetricRecord({name: record[name] for name in alike})}) for record in records]
    return aggregate(list(contents), weighted_by)


def sum_vectors(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Their sum; zeros as in `like` where there are none."""
    return torch.stack(list(vectors)).sum(0) if vectors else torch.zeros_like(like)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"

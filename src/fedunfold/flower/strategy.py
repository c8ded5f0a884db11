"""A Flower strategy with any weighting rule, for people who already have a Flower app.

    from fedunfold.flower import WeightedStrategy
    strategy = WeightedStrategy(fu.dr(q=1), absent="remember")
    result = strategy.start(grid, initial_arrays, num_rounds=10)

It stands where `FedAvg` stood. Clients need no change: a client is known by the id of its node and counts with
the examples of its first reply. With `introduce` in the client app it has a key that outlives a restart, and
its size is said once, when it registers.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedunfold.aggregation import Absent
from fedunfold.errors import DivergenceError, InputError
from fedunfold.federation import Need, RoundReport
from fedunfold.flower.arrays import Layout
from fedunfold.flower.faults import Faults
from fedunfold.flower.messages import MAX_SAMPLES, MESSAGE_TYPES, read_registration
from fedunfold.rounds import Algorithm, Server, aggregate
from fedunfold.server import ServerOptimizer, plain
from fedunfold.weighting import size
from fedunfold.weighting.learned import LearnedWeights
from fedunfold.weighting.rule import State, Weigh, WeightingRule, as_rule

log = logging.getLogger("fedunfold")

REPORTED: Mapping[Need, str] = {"loss": "loss", "start_loss": "start_loss", "accuracy": "accuracy"}
"""Under which name in a reply's metrics a strategy looks for what its rule needs."""


@dataclass(frozen=True)
class _Answer:
    """A reply that is what was asked for: the client's update, and what it reported for the rule."""

    update: Tensor
    numbers: Mapping[str, float]
    metrics: MetricRecord


class WeightedStrategy(FedAvg):
    """Average clients by a weighting rule instead of by what they say they have.

    `rule` is any of fedunfold's, learned weights included, or a function of your own; `server` any of its
    server optimisers; `absent` says what becomes of clients that did not answer. `reported` maps what the rule
    needs (loss, start_loss, accuracy) to the names your clients use for it. Other arguments are `FedAvg`'s.

    A reply that is an error, has other arrays than were sent, values that are not finite, or lacks what the rule
    needs is set aside: it is logged with the client's key, counted in `faults`, and its client is absent in that
    round. Nothing a client sends ends the run.
    """

    def __init__(
        self,
        rule: WeightingRule | Weigh | None = None,
        *,
        server: ServerOptimizer | None = None,
        absent: Absent = "drop",
        reported: Mapping[Need, str] | None = None,
        registration_timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.rule = as_rule(rule or size())
        self.algorithm = Algorithm(server=server or plain(), absent=absent)
        self.faults = Faults()
        self.weights: list[dict[str, float]] = []
        self._names = {**REPORTED, **(reported or {})}
        self._registration_timeout = registration_timeout
        self._keys: dict[int, str] = {}
        self._samples: dict[str, int] = {}
        self._layout: Layout | None = None
        self._server: Server | None = None
        self._state: State = None
        self._asked: list[int] = []
        self._round = 0

    def summary(self) -> None:
        log.info("weights by %s, absent clients: %s", self.rule.name, self.algorithm.absent)
        super().summary()

    # --- a round ---------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked = [message.metadata.dst_node_id for message in messages]
        self._meet(grid)
        if self._layout is None:
            self._layout = Layout.of(arrays)
        model = self._layout.flat(arrays)
        if self._server is None:
            self._server = Server.start(model, self.algorithm)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self._server is None or self._layout is None:
            raise InputError("aggregate_train comes after configure_train.")
        received = list(replies)
        answers = self._answers(received, self._server.model)
        report = self._report(answers)
        row, self._state = self.rule(report, self._state)
        try:
            self._server, _ = aggregate(self._server, report, row, self.algorithm)
        except DivergenceError as error:
            log.error("%s The round is left out.", error)
        self._round += 1
        self.weights.append(dict(zip(report.keys, row.tolist(), strict=True)))
        return self._layout.record(self._server.model, self._heaviest(received)), self._metrics(answers)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found: dict[str, MetricRecord] = {}
        for reply in replies:
            key = self._key(reply.metadata.src_node_id)
            try:
                found[key] = _metrics_of(reply)
            except InputError as error:
                self.faults.add(key, "set aside", f"evaluation in round {server_round} {error}")
        return _mean(found, {key: float(self._samples.get(key, 1)) for key in found})

    # --- clients ---------------------------------------------------------------------------------------

    def _meet(self, grid: Grid) -> None:
        """Ask nodes not seen before who they are; one that cannot say is known by its id."""
        new = [node for node in self._asked if node not in self._keys]
        asked = [Message(RecordDict(), node, MESSAGE_TYPES["register"]) for node in new]
        replies = grid.send_and_receive(asked, timeout=self._registration_timeout) if asked else []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                continue
            try:
                found = read_registration(reply.content)
            except InputError as error:
                log.warning("node %d is known by its id: %s", node, error)
                continue
            # A client that comes back has the key of a node that left; two at once would count as one.
            live = {self._keys[other] for other in self._asked if other in self._keys}
            if found.key in live:
                log.warning("node %d also says it is client %s; it is known by its id", node, found.key)
                continue
            self._keys[node] = found.key
            self._samples.setdefault(found.key, found.samples)
        for node in new:
            self._keys.setdefault(node, str(node))

    def _key(self, node: int) -> str:
        return self._keys.get(node, str(node))

    def _answers(self, replies: list[Message], model: Tensor) -> dict[str, _Answer]:
        """The replies that can be used, by client key."""
        answers: dict[str, _Answer] = {}
        for reply in replies:
            key = self._key(reply.metadata.src_node_id)
            try:
                answers[key] = self._answer(key, reply, model)
            except InputError as error:
                self.faults.add(key, "set aside", f"round {self._round} {error}")
        replied = {self._key(reply.metadata.src_node_id) for reply in replies}
        for node in self._asked:
            if self._key(node) not in replied:
                self.faults.add(self._key(node), "no answer", f"round {self._round}")
        return answers

    def _answer(self, key: str, reply: Message, model: Tensor) -> _Answer:
        metrics = _metrics_of(reply)
        records = list(reply.content.array_records.values())
        if len(records) != 1 or self._layout is None:
            raise InputError(f"has {len(records)} array records in place of one")
        update = self._layout.flat(records[0]) - model
        if not bool(torch.isfinite(update.sum())) and not bool(torch.isfinite(update).all()):
            raise InputError("has a NaN or infinite value in its arrays")
        numbers: dict[str, float] = {}
        for need in self.rule.needs - {"gradients"}:
            value = metrics.get(self._names[need])
            if not (isinstance(value, int | float) and math.isfinite(value)):
                raise InputError(f"lacks the number '{self._names[need]}', which rule '{self.rule.name}' needs")
            numbers[need] = float(value)
        if key not in self._samples:
            examples = metrics.get(self.weighted_by_key)
            if not (isinstance(examples, int | float) and 1 <= examples <= MAX_SAMPLES):
                raise InputError(f"says it has {examples!r} examples ('{self.weighted_by_key}')")
            self._samples[key] = int(examples)
        if isinstance(self.rule, LearnedWeights) and key not in self.rule.keys:
            raise InputError("comes from a client the weights were not learned for")
        return _Answer(update, numbers, metrics)

    def _report(self, answers: Mapping[str, _Answer]) -> RoundReport:
        """All clients known so far; those without an answer are absent."""
        keys = self.rule.keys if isinstance(self.rule, LearnedWeights) else tuple(sorted(self._samples))
        if not keys:
            raise InputError("no client has answered yet, and none has registered; is the client app running?")
        present = [answers[key] for key in keys if key in answers]
        model = self._server.model if self._server is not None else torch.empty(0)
        updates = torch.stack([answer.update for answer in present]) if present else model.new_empty(0, len(model))

        def numbers(need: Need) -> Tensor | None:
            if need not in self.rule.needs:
                return None
            found = [answers[key].numbers[need] if key in answers else math.nan for key in keys]
            return torch.tensor(found, dtype=torch.float64)

        return RoundReport(
            round=self._round,
            keys=keys,
            sizes=torch.tensor([self._samples.get(key, 0) for key in keys], dtype=torch.float64),
            present=torch.tensor([key in answers for key in keys]),
            steps=torch.zeros(len(keys), dtype=torch.long),
            updates=updates,
            loss=numbers("loss"),
            start_loss=numbers("start_loss"),
            accuracy=numbers("accuracy"),
            # Up to the learning rate, which all clients share and angles do not see.
            gradients=-updates if "gradients" in self.rule.needs else None,
        )

    def _heaviest(self, replies: list[Message]) -> ArrayRecord | None:
        """The arrays of the client that counts most: integers, such as counters, are taken from it."""
        weights = self.weights[-1]
        usable = [reply for reply in replies if not reply.has_error() and reply.content.array_records]
        if not usable:
            return None
        best = max(usable, key=lambda reply: weights.get(self._key(reply.metadata.src_node_id), -1.0))
        return next(iter(best.content.array_records.values()))

    def _metrics(self, answers: Mapping[str, _Answer]) -> MetricRecord | None:
        weights = {key: self.weights[-1].get(key, 0.0) for key in answers}
        return _mean({key: answer.metrics for key, answer in answers.items()}, weights, self.weighted_by_key)


def _metrics_of(reply: Message) -> MetricRecord:
    if reply.has_error():
        raise InputError(f"failed: {reply.error.reason}")
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise InputError(f"has {len(records)} metric records in place of one")
    return records[0]


def _mean(records: Mapping[str, MetricRecord], weights: Mapping[str, float], left_out: str = "") -> MetricRecord | None:
    """Weighted mean of every finite number that all records have."""
    total = sum(weights.values())
    if not records or total <= 0:
        return None
    common = set.intersection(*(set(record) for record in records.values())) - {left_out}
    mean = MetricRecord()
    for name in sorted(common):
        values = {key: value for key, record in records.items() if isinstance(value := record[name], int | float)}
        if len(values) == len(records) and all(map(math.isfinite, values.values())):
            mean[name] = sum(weights[key] * value for key, value in values.items()) / total
    return mean

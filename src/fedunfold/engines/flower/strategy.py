"""A Flower strategy with any weighting rule, for people who already have a Flower app.

    from fedunfold.engines.flower import WeightedStrategy
    strategy = WeightedStrategy(fu.fedadp())
    result = strategy.start(grid, initial_arrays, num_rounds=10)

It takes the place of `FedAvg`. Clients need no change: a client is known by the id of its node and counts with the
examples of its first reply. With `add_registration` in the client app it has an id that outlives a restart, and its
size is fixed when it registers; `remember` and learned weights need that.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedunfold.aggregation.absent import coefficients
from fedunfold.aggregation.screening import NOT_USABLE, filter_updates, is_usable
from fedunfold.aggregation.server_round import ServerState, aggregate
from fedunfold.core.algorithm import Absent, Algorithm, UpdateFilter
from fedunfold.core.errors import FederationError, FedunfoldError, InputError
from fedunfold.core.messages import ClientUpdates, Metric, TrainRequest
from fedunfold.core.participation import Participation
from fedunfold.core.parts import Aggregator, ServerOptimizer
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.replies import is_possible, merge_replies
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.engines.flower.wire import RecordLayout, flower_type, read_registration
from fedunfold.io.limits import CLIENT_SAMPLES
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import State, Weigh, WeightingRule, as_rule, decide

log = logging.getLogger("fedunfold")


@dataclass(frozen=True)
class _Update:
    """What can be used of a reply: the update and what the rule requires, counters, and all that was reported."""

    reply: ClientReply
    others: Mapping[str, Array]
    metrics: MetricRecord


@dataclass
class _Run:
    """What the strategy knows since `start`."""

    layout: RecordLayout
    server: ServerState
    others: Mapping[str, Array]
    rule_state: State = None
    round: int = 0
    sampled: tuple[int, ...] = ()
    log_norms: list[Tensor] = field(default_factory=list)
    client_ids: dict[int, str] = field(default_factory=dict)
    num_examples: dict[str, int] = field(default_factory=dict)


class WeightedStrategy(FedAvg):
    """Average clients by a weighting rule instead of by the sizes they report.

    The clients sampled for a round are those that are sent a train message; weights are over these. A reply that is an
    error, has other arrays than were sent, values that are not finite, or lacks what the rule requires is rejected: it
    is logged with the client's id, counted in `failures`, and its client is absent in that round. A round of which the
    rule or the server can make nothing leaves the model as it is.

    Args:
        rule: Any of fedunfold's rules, learned weights included, or a function of your own; size by default.
        server: A server optimiser.
        absent: What becomes of sampled clients that did not answer; "drop" by default. Learned weights bring the
            server, absence and step sizes they were learned for.
        filter: With "norm", updates whose norm is far too large are rejected (`aggregation.screening`).
        aggregator: How the others become one direction (`aggregation.robust`).
        metric_names: Under which names your clients report what the rule requires (loss, start_loss, accuracy).
        registration_timeout: Seconds a new node may take to register.
        **settings: `FedAvg`'s, but for its functions that aggregate metrics: these are means, weighted as the models
            are (training) or by size.

    Attributes:
        rule: The weighting rule.
        algorithm: What the server does with the updates.
        failures: What went wrong with clients.
        weights: Θ of every round over the clients sampled for it, by client id; empty where a round was skipped.

    >>> import fedunfold as fu
    >>> WeightedStrategy(fu.uniform(), absent="remember").algorithm.absent
    'remember'
    """

    def __init__(
        self,
        rule: WeightingRule | Weigh | None = None,
        *,
        server: ServerOptimizer | None = None,
        absent: Absent | None = None,
        filter: UpdateFilter | None = None,
        aggregator: Aggregator | None = None,
        metric_names: Mapping[Metric, str] | None = None,
        registration_timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        if unused := settings.keys() & {"train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"}:
            raise InputError(f"WeightedStrategy weights metrics itself; leave out {sorted(unused)[0]}.")
        super().__init__(**settings)
        self.rule = as_rule(rule or size())
        learned_for = Algorithm(absent="drop")
        if isinstance(self.rule, LearnedWeights) and "algorithm" in self.rule.settings:
            learned_for = self.rule.algorithm
        changes: dict[str, Any] = {"server": server, "absent": absent, "filter": filter, "aggregator": aggregator}
        self.algorithm = replace(learned_for, **{name: part for name, part in changes.items() if part is not None})
        self.failures = Failures()
        self.weights: list[dict[str, float]] = []
        self._metric_names = metric_names or {}
        self._registration_timeout = registration_timeout
        self._run: _Run | None = None

    def summary(self) -> None:
        """Log how clients are weighted, and FedAvg's settings."""
        log.info("weights by %s, absent clients: %s", self.rule.name, self.algorithm.absent)
        super().summary()

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **named: Any) -> Result:
        """Run the rounds, from scratch: nothing of an earlier start is left.

        Args:
            grid: Flower's grid.
            initial_arrays: The initial model.
            num_rounds: T.
            *more: `FedAvg`'s.
            **named: `FedAvg`'s.
        """
        if isinstance(self.rule, LearnedWeights) and num_rounds > len(self.rule.weights):
            raise InputError(f"the weights were learned for {len(self.rule.weights)} rounds; run as many or fewer.")
        layout = RecordLayout.of(initial_arrays)
        model, others = layout.read(initial_arrays)
        self._run = _Run(layout, ServerState.start(model, self.algorithm), others)
        self.failures, self.weights = Failures(), []
        return super().start(grid, initial_arrays, num_rounds, *more, **named)

    # --- a round ---------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages; those who are sent one are the cohort."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        run = self._started()
        run.sampled = tuple(message.metadata.dst_node_id for message in messages)
        self._register(run, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, and means of the clients' metrics."""
        run, by_client = self._started(), self._by_client(replies)
        expected = dict.fromkeys([*by_client, *map(self._name, run.sampled)])
        updates = self.failures.accept_replies(by_client, expected, f"round {run.round}", self._read_update)
        weights: dict[str, float] = {}
        try:
            weights = self._step(run, updates)
        except FedunfoldError as error:
            log.error("round %d is skipped: %s", run.round, error)
        if updates and weights:
            run.others = updates[max(updates, key=lambda client_id: weights.get(client_id, 0.0))].others
        run.round += 1
        self.weights.append(weights)
        reported = {client_id: found.metrics for client_id, found in updates.items()}
        metrics = _mean(reported, weights, self.weighted_by_key)
        return run.layout.record(run.server.model, run.others), metrics

    def _step(self, run: _Run, updates: dict[str, _Update]) -> dict[str, float]:
        """Weigh and aggregate; rejected clients are taken out of the updates. Gives Θ over the cohort."""
        report = self._report(run, updates)
        if not report.client_ids:
            raise FederationError("no client has answered or registered so far.")
        normalized = self.algorithm.local.normalized
        filtered = filter_updates(report, self.algorithm.filter, run.log_norms, normalized=normalized)
        for entry in filtered.rejected:
            self.failures.add(entry.client, "rejected", f"round {run.round} {entry.reason}")
            del updates[entry.client]
        decision, remembered = decide(self.rule, filtered.report, run.rule_state)
        ((run.server, _),) = aggregate([run.server], [filtered.report], [decision], self.algorithm)
        run.log_norms.append(filtered.log_norms)
        run.rule_state = remembered
        over_cohort = coefficients(decision.weights, report.cohort)
        return {report.client_ids[k]: float(over_cohort[k]) for k in torch.nonzero(report.cohort).flatten().tolist()}

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means of the clients' metrics, weighted by size."""
        by_client, about = self._by_client(replies), f"evaluation in round {server_round}"
        found = self.failures.accept_replies(by_client, by_client, about, lambda reply, _: _metrics_of(reply))
        sizes = {client_id: float(self._started().num_examples.get(client_id, 1)) for client_id in found}
        return _mean(found, sizes, self.weighted_by_key)

    def _started(self) -> _Run:
        if self._run is None:
            raise InputError("a WeightedStrategy is run by its start().")
        return self._run

    # --- clients ---------------------------------------------------------------------------------------

    def _name(self, node: int) -> str:
        return self._started().client_ids.get(node, _node_name(node))

    def _by_client(self, replies: Iterable[Message]) -> dict[str, Message]:
        return {self._name(reply.metadata.src_node_id): reply for reply in replies}

    def _register(self, run: _Run, grid: Grid) -> None:
        """Have sampled nodes that are not known register; an ordinary client, which cannot, is known by its node.

        One that did not answer, or claims the id of a node that is still connected, has none until the next round.
        """
        online = set(grid.get_node_ids())
        run.client_ids = {node: client_id for node, client_id in run.client_ids.items() if node in online}
        unknown = [node for node in run.sampled if node not in run.client_ids]
        messages = [Message(RecordDict(), node, flower_type("register")) for node in unknown]
        replies = grid.send_and_receive(messages, timeout=self._registration_timeout) if messages else []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                run.client_ids[node] = _node_name(node)
                continue
            try:
                found = read_registration(reply.content)
                if found.client_id in run.client_ids.values():
                    raise InputError(f"client {found.client_id} is connected already, as another node.")
            except InputError as error:
                log.warning("node %d is left out for now: %s", node, error)
                continue
            run.client_ids[node] = found.client_id
            run.num_examples.setdefault(found.client_id, found.num_examples)

    def _read_update(self, message: Message, client_id: str) -> _Update:
        run = self._started()
        if message.metadata.src_node_id not in run.client_ids:
            raise InputError("comes from a node that has not registered")
        metrics = _metrics_of(message)
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise InputError(f"has {len(records)} array records in place of one")
        if isinstance(self.rule, LearnedWeights) and client_id not in self.rule.client_ids:
            raise InputError("comes from a client the weights were not learned for")
        model, others = run.layout.read(records[0])
        delta = model - run.server.model
        if not is_usable(delta[None]):
            raise InputError(f"{NOT_USABLE} in its arrays")
        numbers: dict[str, float] = {}
        for metric in self.rule.required_metrics - {"gradients"}:
            name = self._metric_names.get(metric, metric)
            value = metrics.get(name)
            if not (isinstance(value, int | float) and is_possible(metric, value)):
                raise InputError(f"has {value!r} for '{name}', which rule '{self.rule.name}' requires")
            numbers[metric] = float(value)
        if client_id not in run.num_examples:
            run.num_examples[client_id] = self._read_num_examples(metrics)
        # The gradients up to the learning rate, which all clients share and angles do not see.
        arrays = {"updates": delta, "gradients": -run.layout.params.params(delta)}
        return _Update(ClientReply(numbers, arrays), others, metrics)

    def _read_num_examples(self, metrics: MetricRecord) -> int:
        count = metrics.get(self.weighted_by_key)
        if not (isinstance(count, int | float) and 1 <= count < math.inf):
            raise InputError(f"reports {count!r} examples ('{self.weighted_by_key}')")
        return CLIENT_SAMPLES.check(int(count), f"reports too many examples ('{self.weighted_by_key}'): ")

    def _report(self, run: _Run, updates: Mapping[str, _Update]) -> ClientUpdates:
        """The round of all clients known so far; sampled ones without an update are absent."""
        # In the order they were first seen in: the server's memory goes by position.
        client_ids = self.rule.client_ids if isinstance(self.rule, LearnedWeights) else run.num_examples
        sampled = {self._name(node) for node in run.sampled}
        cohort = np.array([client_id in sampled for client_id in client_ids], dtype=bool)
        request = TrainRequest("", run.round, run.server.model, self.algorithm.local, self.rule.required_metrics)
        sizes = {client_id: run.num_examples.get(client_id, 0) for client_id in client_ids}
        replies = {client_id: update.reply for client_id, update in updates.items()}
        return merge_replies(request, sizes, Participation(cohort, cohort), replies, run.layout.params)


def _node_name(node: int) -> str:
    """The id of a client that has none of its own; no client can register one with a colon."""
    return f"node:{node}"


def _metrics_of(reply: Message) -> MetricRecord:
    if reply.has_error():
        raise InputError(f"failed: {reply.error.reason}")
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise InputError(f"has {len(records)} metric records in place of one")
    return records[0]


def _mean(records: Mapping[str, MetricRecord], weights: Mapping[str, float], left_out: str) -> MetricRecord | None:
    """Weighted mean of every finite number that all records have, but for one."""
    total = sum(weights.get(client_id, 0.0) for client_id in records)
    if not records or total <= 0:
        return None
    common = set.intersection(*(set(record) for record in records.values())) - {left_out}
    mean = MetricRecord()
    for name in sorted(common):
        values = {key: value for key, record in records.items() if isinstance(value := record[name], int | float)}
        if len(values) == len(records) and all(map(math.isfinite, values.values())):
            mean[name] = sum(weights.get(key, 0.0) * value for key, value in values.items()) / total
    return mean

"""A Flower strategy with any weighting rule, for people who already have a Flower app.

    from fedunfold.engines.flower import WeightedStrategy
    strategy = WeightedStrategy(fu.fedadp())
    result = strategy.start(grid, initial_arrays, num_rounds=10)

It stands where `FedAvg` stood. Clients need no change: a client is known by the id of its node and counts with
the examples of its first reply. With `introduce` in the client app it has a key that outlives a restart, and
its size is said once, when it registers; `remember` and learned weights need that.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedunfold.aggregation.absent import Absent
from fedunfold.aggregation.robust import Aggregator
from fedunfold.aggregation.screening import UpdateFilter
from fedunfold.core.errors import FedunfoldError, InputError
from fedunfold.core.federation import ClientUpdates, Need
from fedunfold.engines.flower.faults import Faults
from fedunfold.engines.flower.schema import possible
from fedunfold.engines.flower.serialization import Layout
from fedunfold.engines.flower.wire import MESSAGE_TYPES, read_registration
from fedunfold.io.limits import CLIENT_SAMPLES
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import State, Weigh, WeightingRule, as_rule
from fedunfold.server.optimizers import ServerOptimizer
from fedunfold.training.loop import Algorithm, Server, aggregate
from fedunfold.training.methods import learned_method

log = logging.getLogger("fedunfold")

REPORTED: Mapping[Need, str] = {"loss": "loss", "start_loss": "start_loss", "accuracy": "accuracy"}
"""Under which name in a reply's metrics a strategy looks for what its rule needs."""


@dataclass(frozen=True)
class _Answer:
    """A reply that is what was asked for: the client's update and counters, and what it reported for the rule."""

    update: Tensor
    others: Mapping[str, Array]
    numbers: Mapping[str, float]
    metrics: MetricRecord


@dataclass
class _Run:
    """What the strategy knows since `start`. Clients stay in the order they were first seen in."""

    layout: Layout
    server: Server
    others: Mapping[str, Array]
    state: State = None
    round: int = 0
    asked: tuple[int, ...] = ()
    lengths: list[Tensor] = field(default_factory=list)


class WeightedStrategy(FedAvg):
    """Average clients by a weighting rule instead of by what they say they have.

    `rule` is any of fedunfold's, learned weights included, or a function of your own; `server` any of its server
    optimisers; `absent` says what becomes of clients that did not answer ("drop" where nothing is said). Learned
    weights bring the server, absence and step sizes they were learned for. `screen="norm"` sets aside updates that are
    far too long (`screening`), `aggregate` puts the others together in a robust way (`robust`). `reported` maps what
    the rule needs (loss, start_loss, accuracy) to the names your clients use for it. Other arguments are `FedAvg`'s,
    but for its functions that aggregate metrics: these are means, weighted as the models are (training) or by size.

    A reply that is an error, has other arrays than were sent, values that are not finite, or lacks what the rule
    needs is set aside: it is logged with the client's key, counted in `faults`, and its client is absent in that
    round. A round the rule or the server cannot make anything of leaves the model as it is.
    """

    def __init__(
        self,
        rule: WeightingRule | Weigh | None = None,
        *,
        server: ServerOptimizer | None = None,
        absent: Absent | None = None,
        screen: UpdateFilter | None = None,
        aggregate: Aggregator | None = None,
        reported: Mapping[Need, str] | None = None,
        registration_timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        if unused := settings.keys() & {"train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"}:
            raise InputError(f"WeightedStrategy weights metrics itself; leave out {sorted(unused)[0]}.")
        super().__init__(**settings)
        self.rule = as_rule(rule or size())
        learned_for = Algorithm(absent="drop")
        if isinstance(self.rule, LearnedWeights) and "algorithm" in self.rule.settings:
            learned_for = learned_method(self.rule).algorithm
        changes: dict[str, Any] = {"server": server, "absent": absent, "screen": screen, "aggregate": aggregate}
        self.algorithm = replace(learned_for, **{name: part for name, part in changes.items() if part is not None})
        self.faults = Faults()
        self.weights: list[dict[str, float]] = []
        self._names = {**REPORTED, **(reported or {})}
        self._registration_timeout = registration_timeout
        self._keys: dict[int, str] = {}
        self._samples: dict[str, int] = {}
        self._run: _Run | None = None

    def summary(self) -> None:
        log.info("weights by %s, absent clients: %s", self.rule.name, self.algorithm.absent)
        super().summary()

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **named: Any) -> Result:
        """Run the rounds, from scratch: nothing of an earlier start is left."""
        if isinstance(self.rule, LearnedWeights) and num_rounds > len(self.rule.weights):
            raise InputError(f"the weights were learned for {len(self.rule.weights)} rounds; run as many or fewer.")
        layout = Layout.of(initial_arrays)
        model, others = layout.read(initial_arrays)
        self._run = _Run(layout, Server.start(model, self.algorithm), others)
        self.faults, self.weights, self._keys, self._samples = Faults(), [], {}, {}
        return super().start(grid, initial_arrays, num_rounds, *more, **named)

    # --- a round ---------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        run = self._started()
        run.asked = tuple(message.metadata.dst_node_id for message in messages)
        self._meet(grid, run.asked)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        run = self._started()
        answers = self._answers(run, replies)
        report = self._report(run, answers)
        weights: dict[str, float] = {}
        try:
            if not report.keys:
                raise InputError("no client has answered or registered so far.")
            sifted = self.algorithm.filter_updates(report, run.lengths)
            for entry in sifted.rejected:
                self.faults.add(entry.client, "set aside", f"round {run.round} {entry.reason}")
                del answers[entry.client]
            row, remembered = self.rule(sifted.report, run.state)
            run.server, _ = aggregate(run.server, sifted.report, row, self.algorithm)
            run.lengths.append(sifted.lengths)
            run.state = remembered
            weights = dict(zip(report.keys, row.tolist(), strict=True))
        except FedunfoldError as error:
            log.error("round %d is left out: %s", run.round, error)
        if answers and weights:
            run.others = answers[max(answers, key=lambda key: weights[key])].others
        run.round += 1
        self.weights.append(weights)
        metrics = _mean({key: a.metrics for key, a in answers.items()}, weights, self.weighted_by_key)
        return run.layout.record(run.server.model, run.others), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found: dict[str, MetricRecord] = {}
        for reply in replies:
            key = self._keys.get(reply.metadata.src_node_id, _by_id(reply.metadata.src_node_id))
            try:
                found[key] = _metrics_of(reply)
            except InputError as error:
                self.faults.add(key, "set aside", f"evaluation in round {server_round} {error}")
        return _mean(found, {key: float(self._samples.get(key, 1)) for key in found}, self.weighted_by_key)

    def _started(self) -> _Run:
        if self._run is None:
            raise InputError("a WeightedStrategy is run by its start().")
        return self._run

    # --- clients ---------------------------------------------------------------------------------------

    def _meet(self, grid: Grid, asked: Iterable[int]) -> None:
        """Ask nodes that have no key who they are; an ordinary client, which cannot say, is known by its node.

        One that did not answer, or claims the key of a node that is still there, has none until it is asked again.
        """
        online = set(grid.get_node_ids())
        self._keys = {node: key for node, key in self._keys.items() if node in online}
        questions = [Message(RecordDict(), node, MESSAGE_TYPES["register"]) for node in asked if node not in self._keys]
        replies = grid.send_and_receive(questions, timeout=self._registration_timeout) if questions else []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._keys[node] = _by_id(node)
                continue
            try:
                found = read_registration(reply.content)
                if found.key in self._keys.values():
                    raise InputError(f"client {found.key} is there already, as another node.")
            except InputError as error:
                log.warning("node %d is left out for now: %s", node, error)
                continue
            self._keys[node] = found.key
            self._samples.setdefault(found.key, found.samples)

    def _answers(self, run: _Run, replies: Iterable[Message]) -> dict[str, _Answer]:
        """The replies that can be used, by client key."""
        answers: dict[str, _Answer] = {}
        replied = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            replied.add(node)
            key = self._keys.get(node, _by_id(node))
            try:
                if node not in self._keys:
                    raise InputError("comes from a node that has not registered")
                answers[key] = self._answer(run, key, reply)
            except InputError as error:
                self.faults.add(key, "set aside", f"round {run.round} {error}")
        for node in run.asked:
            if node not in replied:
                self.faults.add(self._keys.get(node, _by_id(node)), "no answer", f"round {run.round}")
        return answers

    def _answer(self, run: _Run, key: str, reply: Message) -> _Answer:
        metrics = _metrics_of(reply)
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise InputError(f"has {len(records)} array records in place of one")
        if isinstance(self.rule, LearnedWeights) and key not in self.rule.keys:
            raise InputError("comes from a client the weights were not learned for")
        model, others = run.layout.read(records[0])
        update = model - run.server.model
        if not bool(torch.isfinite(update.norm())):
            raise InputError("has a NaN, infinite or far too large value in its arrays")
        numbers: dict[str, float] = {}
        for need in self.rule.needs - {"gradients"}:
            value = metrics.get(self._names[need])
            if not (isinstance(value, int | float) and possible(need, value)):
                raise InputError(f"has {value!r} for '{self._names[need]}', which rule '{self.rule.name}' needs")
            numbers[need] = float(value)
        if key not in self._samples:
            examples = metrics.get(self.weighted_by_key)
            if not (isinstance(examples, int | float) and 1 <= examples <= CLIENT_SAMPLES.value):
                raise InputError(f"says it has {examples!r} examples ('{self.weighted_by_key}')")
            self._samples[key] = int(examples)
        return _Answer(update, others, numbers, metrics)

    def _report(self, run: _Run, answers: Mapping[str, _Answer]) -> ClientUpdates:
        """All clients known so far; those without an answer are absent."""
        # In the order they were first seen in: the server's memory goes by position.
        keys = self.rule.keys if isinstance(self.rule, LearnedWeights) else tuple(self._samples)
        present, model = [answers[key] for key in keys if key in answers], run.server.model
        statistics = run.layout.statistics
        updates = torch.stack([answer.update for answer in present]) if present else model.new_empty(0, len(model))

        def numbers(need: Need) -> Tensor | None:
            if need not in self.rule.needs:
                return None
            found = [answers[key].numbers[need] if key in answers else math.nan for key in keys]
            return torch.tensor(found, dtype=torch.float64)

        return ClientUpdates(
            round=run.round,
            keys=keys,
            sizes=torch.tensor([self._samples.get(key, 0) for key in keys], dtype=torch.float64),
            present=torch.tensor([key in answers for key in keys], dtype=torch.bool),
            steps=torch.zeros(len(keys), dtype=torch.long),
            updates=updates,
            loss=numbers("loss"),
            start_loss=numbers("start_loss"),
            accuracy=numbers("accuracy"),
            # Up to the learning rate, which all clients share and angles do not see.
            gradients=-updates[:, : updates.shape[1] - statistics] if "gradients" in self.rule.needs else None,
            statistics=statistics,
        )


def _by_id(node: int) -> str:
    """The key of a client that has none of its own; no client can register one with a colon."""
    return f"node:{node}"


def _metrics_of(reply: Message) -> MetricRecord:
    if reply.has_error():
        raise InputError(f"failed: {reply.error.reason}")
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise InputError(f"has {len(records)} metric records in place of one")
    return records[0]


def _mean(records: Mapping[str, MetricRecord], weights: Mapping[str, float], left_out: str = "") -> MetricRecord | None:
    """Weighted mean of every finite number that all records have."""
    total = sum(weights.get(key, 0.0) for key in records)
    if not records or total <= 0:
        return None
    common = set.intersection(*(set(record) for record in records.values())) - {left_out}
    mean = MetricRecord()
    for name in sorted(common):
        values = {key: value for key, record in records.items() if isinstance(value := record[name], int | float)}
        if len(values) == len(records) and all(map(math.isfinite, values.values())):
            mean[name] = sum(weights[key] * value for key, value in values.items()) / total
    return mean

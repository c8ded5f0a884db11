"""A Flower strategy that does not wait for slow clients: FedBuff (Nguyen et al. 2022).

    from fedunfold.engines.flower import BufferedStrategy
    strategy = BufferedStrategy(buffer=10)
    result = strategy.start(grid, initial_arrays, num_rounds=100)

Every client that has nothing to do is sent the newest model. As soon as c updates have arrived, the server makes a step
from them; those still on their way enter a later one, with their staleness. An update is what its client made of the
model that it was sent, Δ_k = w_k − w^(t−s).
"""

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower.progress import Evaluate, Progress
from fedunfold.engines.flower.strategy import WeightedStrategy
from fedunfold.rules.fedbuff import fedbuff
from fedunfold.rules.rule import Weigh, WeightingRule, for_rounds, remarks_of

POLL_SECONDS = 0.1
log = logging.getLogger("fedunfold")


@dataclass(frozen=True)
class Sent:
    """A model on its way to a client and back.

    Attributes:
        message: What was sent.
        step: Which step of the server was to follow.
        model: w^(t), [d].
        since: When it was sent.
    """

    message: Message
    step: int
    model: Tensor
    since: float

    @property
    def node(self) -> int:
        """Where it went."""
        return int(self.message.metadata.dst_node_id)


class BufferedStrategy(WeightedStrategy):
    """Asynchronous rounds: a step from every c updates, whichever model they were trained from.

    A client is sent a model again once its update has entered a step, so that it counts at most once in each; one that
    failed, once the next step has been made. Models are tested by the server (`evaluate_fn`): clients would have to be
    waited for. A run is not resumed.

    Args:
        rule: How updates are weighted; by default `fedbuff()`, which discounts stale ones. Any rule finds how stale
            they are in its report's `staleness`.
        buffer: c, at most as many as there are nodes.
        concurrency: How many clients train at a time; by default all that are connected.
        **settings: `WeightedStrategy`'s.

    >>> BufferedStrategy(buffer=5).rule.name
    'fedbuff'
    """

    def __init__(
        self,
        rule: WeightingRule | Weigh | None = None,
        *,
        buffer: int = 10,
        concurrency: int | None = None,
        **settings: Any,
    ) -> None:
        for name, count in (("buffer", buffer), ("concurrency", 1 if concurrency is None else concurrency)):
            if count < 1:
                raise InputError(f"BufferedStrategy needs a {name} of at least 1, not {count}.")
        if settings.setdefault("fraction_evaluate", 0.0):
            raise InputError("BufferedStrategy waits for no client to evaluate; test models by evaluate_fn.")
        if settings.get("checkpoint") is not None:
            raise InputError("BufferedStrategy resumes no run; leave the checkpoint out.")
        super().__init__(fedbuff() if rule is None else rule, **settings)
        self._buffer, self._concurrency = buffer, concurrency
        self._in_flight: dict[str, Sent] = {}
        self._arrived: list[tuple[Sent, Message]] = []
        self._failed: set[int] = set()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Make the server's steps, from scratch.

        Args:
            grid: Flower's grid.
            initial_arrays: The initial model.
            num_rounds: How many steps there are.
            timeout: Seconds that a client may take to train; what comes later is not used.
            train_config: Sent to clients, with the number of the step as `server-round`.
            evaluate_config: Not used.
            evaluate_fn: The server's own evaluation.

        Raises:
            FederationError: Too few updates arrived to make a step from, or none of the steps trained the model.
        """
        run, result, arrays = self._begin(initial_arrays, for_rounds(self.rule, num_rounds)), Result(), initial_arrays
        self._in_flight, self._arrived, self._failed = {}, [], set()
        config = train_config or ConfigRecord()
        if evaluate_fn is not None and (tested := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = tested
        for step in range(1, num_rounds + 1):
            run.adopt(arrays)
            self._collect(grid, run, step, arrays, config, timeout)
            aggregated, metrics = self.aggregate_train(step, self._due(run, step))
            if aggregated is not None:
                result.arrays = arrays = aggregated
            if metrics is not None:
                result.train_metrics_clientapp[step] = metrics
            if evaluate_fn is not None and (tested := evaluate_fn(step, arrays)) is not None:
                result.evaluate_metrics_serverapp[step] = tested
        if not run.has_trained:
            raise FederationError(
                f"none of {num_rounds} steps has trained the model, the last one because {run.problem}; the log has "
                "the reason for every client and step."
            )
        for remark in remarks_of(run.rule, run.rule_state):
            log.warning(remark)
        return result

    def _collect(
        self, grid: Grid, run: Progress, step: int, arrays: ArrayRecord, config: ConfigRecord, timeout: float
    ) -> None:
        """Keep clients busy until the buffer is full."""
        last = time.monotonic()
        self._failed.clear()
        while len(self._arrived) < self._buffer:
            self._send(grid, run, step, arrays, config)
            replies = list(grid.pull_messages(list(self._in_flight))) if self._in_flight else []
            for reply in replies:
                self._receive(run, self._in_flight.pop(reply.metadata.reply_to_message_id), reply)
            now = time.monotonic()
            for message, sent in list(self._in_flight.items()):
                if now - sent.since > timeout:
                    del self._in_flight[message]
                    self.failures.add(run.roster.name(sent.node), "no answer", f"step {step}, in {timeout:g} s")
            last = now if replies else last
            if now - last > timeout:
                raise FederationError(
                    f"step {step}: {len(self._arrived)} of the {self._buffer} updates that it is made from have "
                    f"arrived, and no more in {timeout:g} s; make the buffer smaller, or connect more clients."
                )
            if not replies:
                time.sleep(POLL_SECONDS)

    def _send(self, grid: Grid, run: Progress, step: int, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Send the newest model to clients that have nothing to do, as many as may train at a time."""
        online = sorted(grid.get_node_ids())
        run.roster.note_connected(set(online), run.round)
        busy = {sent.node for sent in (*self._in_flight.values(), *(sent for sent, _ in self._arrived))}
        idle = [node for node in online if node not in busy | self._failed]
        room = (self._concurrency or len(online)) - len(self._in_flight)
        chosen = random.sample(idle, max(0, min(room, len(idle))))
        if not chosen:
            return
        config["server-round"] = step
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        messages = list(self._construct_messages(record, chosen, MessageType.TRAIN))
        pushed, now = set(grid.push_messages(messages)), time.monotonic()
        for message in messages:
            if message.metadata.message_id in pushed:
                self._in_flight[message.metadata.message_id] = Sent(message, step, run.server.model, now)

    def _receive(self, run: Progress, sent: Sent, reply: Message) -> None:
        """Into the buffer, unless it is an error."""
        if reply.has_error():
            self.failures.add(run.roster.name(sent.node), "failed", f"step {sent.step}: {reply.error.reason}")
            self._failed.add(sent.node)
            return
        self._arrived.append((sent, reply))

    def _due(self, run: Progress, step: int) -> list[Message]:
        """The buffer's replies, as if they had been trained from the newest model: w^(t) + Δ_k."""
        self._arrived, due = self._arrived[self._buffer :], self._arrived[: self._buffer]
        run.asked, run.messages = step, tuple(sent.message for sent, _ in due)
        run.staleness = {sent.node: step - sent.step for sent, _ in due}
        return [self._moved(run, sent, reply) if sent.step < step else reply for sent, reply in due]

    def _moved(self, run: Progress, sent: Sent, reply: Message) -> Message:
        for name, record in reply.content.array_records.items():
            try:
                found = run.layout.read(record)
            except InputError:
                return reply  # which is refused where it is read
            vector = found.vector
            vector = vector + (run.server.model - sent.model.to(run.server.model)).to(vector)
            reply.content[name] = run.layout.record(vector, found.counters, found.types)
        return reply

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: nobody can ask for a round of which there is none."""
        raise InputError("BufferedStrategy has a loop of its own; call its start().")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked to."""
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """There is nothing to aggregate."""
        return None

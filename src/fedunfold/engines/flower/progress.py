"""Where a Flower strategy stands, in memory and in a checkpoint."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor

from fedunfold.aggregation.server_round import ServerState
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.engines.flower.failures import FailureKind, Failures
from fedunfold.engines.flower.model_arrays import RecordLayout
from fedunfold.engines.flower.roster import Roster
from fedunfold.io.checkpoint import Checkpoint, Tensors
from fedunfold.io.plain_values import from_plain, to_plain
from fedunfold.rules.rule import State, WeightingRule, describe_rule, renamed, uses_of
from fedunfold.version import VERSION

Stage = Literal["train", "evaluate", "server"]
"""Metrics of the clients' training, of their evaluation, and of the server's own evaluation."""
log = logging.getLogger("fedunfold")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class Progress:
    """What a strategy knows since its start.

    Attributes:
        layout: What the model's arrays are.
        rule: The weighting rule, which knows the number of rounds where it wants to.
        server: The server's model, its optimiser's state and its memory of clients' updates.
        counters: The model's arrays of whole numbers.
        types: In which type each array is given back.
        rule_state: What the rule remembers.
        round: How many rounds clients were asked to train in.
        server_round: The last of Flower's rounds, from 1, whose training is aggregated.
        resumed: What `server_round` was in the checkpoint; 0 without one.
        sent: The model as Flower has it, which clients train next.
        asked: The last of Flower's rounds that `messages` are of.
        messages: What clients were sent last to train, and `evaluating` to evaluate.
        log_norms: Of every round those of the updates accepted (`aggregation.screening`).
        roster: The clients that have answered.
        failures: What went wrong with clients.
        weights: Θ of every round by client id.
        metrics: By stage and Flower's round, None where there were none.
        rejected: Whose replies of this round were rejected, and why.
        has_trained: Whether any round has trained the model.
        problem: Why the last round has not.
        staleness: By node, how many steps the server has made since this step's clients were sent a model; None where
            they were all sent the newest.
        store: Where all of this is saved.
    """

    layout: RecordLayout
    rule: WeightingRule
    server: ServerState
    counters: Mapping[str, np.ndarray]
    types: Mapping[str, np.dtype[Any]]
    rule_state: State = None
    round: int = 0
    server_round: int = 0
    resumed: int = 0
    sent: ArrayRecord | None = None
    asked: int = 0
    messages: tuple[Message, ...] = ()
    evaluating: tuple[Message, ...] = ()
    log_norms: list[Tensor] = field(default_factory=list)
    roster: Roster = field(default_factory=Roster)
    failures: Failures = field(default_factory=Failures)
    weights: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[Stage, dict[int, MetricRecord | None]] = field(
        default_factory=lambda: {stage: {} for stage in get_args(Stage)}
    )
    rejected: dict[str, str] = field(default_factory=dict)
    has_trained: bool = False
    problem: str = ""
    staleness: Mapping[int, int] | None = None
    store: Checkpoint | None = None

    @classmethod
    def start(cls, arrays: ArrayRecord, rule: WeightingRule, algorithm: Algorithm) -> "Progress":
        """Before the first round."""
        if "server data" in uses_of(rule):
            raise InputError(
                f"rule '{rule.name}' reads data of the server, of which a WeightedStrategy has none; run it over "
                "federation_from_environment or federation_from_config."
            )
        layout = RecordLayout.of(arrays)
        model = layout.read(arrays)
        server = ServerState.start(model.vector, algorithm)
        return cls(layout, rule, server, model.counters, model.types, sent=arrays)

    @property
    def client_ids(self) -> list[str]:
        """All clients, in an order that stays: the server's memory goes by position."""
        named: tuple[str, ...] | None = getattr(self.rule, "client_ids", None)
        return list(self.roster.num_examples if named is None else named)

    def record(self) -> ArrayRecord:
        """The model as clients are sent it."""
        self.sent = self.layout.record(self.server.model, self.counters, self.types)
        return self.sent

    def adopt(self, arrays: ArrayRecord) -> None:
        """Continue from the model that is sent, where a hook or wrapper has changed it since it was aggregated."""
        if arrays is self.sent:
            return
        try:
            found = self.layout.read(arrays)
        except InputError as error:
            raise InputError(f"the model to be sent {error}; send one that is like it.") from error
        if found.dtype == np.float64:
            self.widen()
        self.server = replace(self.server, model=found.vector.to(self.server.model.dtype))
        self.counters, self.types, self.sent = found.counters, found.types, arrays

    @property
    def first_rejection(self) -> str:
        """Why a round has not trained in which nothing else went wrong."""
        return next((f"client {name} {reason}" for name, reason in self.rejected.items()), "no client answered")

    def sampled(self) -> list[str]:
        """Who was sent a train message; one that was not sent, by a strategy that chose among them, has no id."""
        sent = [message for message in self.messages if message.metadata.message_id] or self.messages
        return [self.roster.name(message.metadata.dst_node_id) for message in sent]

    def sender(self, reply: Message) -> int:
        """The node a reply is from; one that was lost comes as an error from no node, so what it replies to counts."""
        sent = [message.metadata for message in (*self.messages, *self.evaluating) if message.metadata.message_id]
        asked = {metadata.message_id: metadata.dst_node_id for metadata in sent}
        return asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)

    def widen(self) -> None:
        """Go on in double precision, with all that is compared with updates."""
        self.server, self.rule_state = self.server.widened(), _widened(self.rule_state)

    def rename(self, before: str, after: str) -> None:
        """Tell the rule that a client turns out to have another id."""
        if before != after:
            self.rule_state = renamed(self.rule, self.rule_state, before, after)

    def forget(self, after: int) -> None:
        """Let go of clients without a lasting id whose nodes left more than so many rounds ago, with their updates."""
        before = self.client_ids
        gone = set(self.roster.forget(self.round - after))
        if left := sum(before[k] in gone for k in self.server.memory):
            log.warning(
                "round %d: the updates of %d clients are no longer remembered, because their nodes left more than %d "
                "rounds ago; have clients register with registration_mod if they come back as other nodes",
                *(self.round, left, after),
            )
        if gone:
            self._remember_only({before[k]: row for k, row in self.server.memory.items() if before[k] not in gone})

    def limit_memory(self, most: int) -> None:
        """Remember the updates of so many clients at most: of those that were connected last."""
        names, connected = self.client_ids, self.roster.connected
        rows = {names[k]: row for k, row in self.server.memory.items()}
        if over := max(0, len(rows) - most):
            log.warning(
                "round %d: the updates of %d clients are no longer remembered, because those of %d are at most; "
                "raise remember_clients if they are to count",
                *(self.round, over, most),
            )
            latest = sorted(rows, key=lambda name: connected.get(name, self.round))[over:]
            self._remember_only({name: rows[name] for name in latest})

    def _remember_only(self, rows: Mapping[str, Tensor]) -> None:
        place = {name: k for k, name in enumerate(self.client_ids)}
        self.server = replace(self.server, memory=dict(sorted((place[name], row) for name, row in rows.items())))

    # --- rounds of before a restart --------------------------------------------------------------------

    def is_past(self, stage: Stage, server_round: int) -> bool:
        """Whether the checkpoint has this part of a round: it is saved once the round's training is aggregated."""
        return server_round <= self.resumed if stage == "train" else server_round < self.resumed

    def note(self, stage: Stage, server_round: int, metrics: MetricRecord | None) -> MetricRecord | None:
        """Keep a round's metrics for the checkpoint, and give them back."""
        self.metrics[stage][server_round] = metrics
        return metrics

    def replaying(self, evaluate: Evaluate | None) -> Evaluate | None:
        """The server's evaluation, of which the results of past rounds are taken from the checkpoint."""
        if evaluate is None:
            return None

        def replayed(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if self.is_past("server", server_round):
                return self.metrics["server"].get(server_round)
            return self.note("server", server_round, evaluate(server_round, arrays))

        return replayed

    # --- the checkpoint --------------------------------------------------------------------------------

    def open(self, path: Path, about: Mapping[str, Any], num_rounds: int) -> None:
        """Save to a file from now on, and go on from what it holds.

        Args:
            path: The file.
            about: What of the run has to be the same where it is resumed, beside the rule and the arrays' shapes. Their
                values may differ: many apps draw a new initial model at every start.
            num_rounds: T.
        """
        shapes = {name: list(shape) for name, shape in self.layout.shapes.items()}
        self.store = Checkpoint(
            path, "run", {**describe_rule(self.rule), **about, "arrays": shapes, "version": VERSION}
        )
        self.store.load(self._resume)
        if self.resumed > num_rounds:
            raise InputError(f"{path} holds {self.resumed} rounds, more than the {num_rounds} requested; request more.")
        if self.resumed:
            log.info("resuming after round %d of %d, saved in %s", self.resumed, num_rounds, path)

    def save(self) -> None:
        """Write where the run stands, where there is a file to write to."""
        if self.store is not None:
            self.store.save(*self.to_parts())

    def to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and the rest in plain values."""
        remembered: dict[str, Tensor] = {}
        rule_state = to_plain(self.rule_state, remembered)
        tensors = self.server.to_tensors() | remembered
        tensors |= {f"counter-{i}": torch.from_numpy(values.copy()) for i, values in enumerate(self.counters.values())}
        tensors |= {f"log_norms-{t}": row for t, row in enumerate(self.log_norms)}
        roster = self.roster
        return tensors, {
            "round": self.round,
            "server_round": self.server_round,
            "has_trained": self.has_trained,
            "problem": self.problem,
            "rule": rule_state,
            "types": {name: kind.str for name, kind in self.types.items()},
            "num_examples": roster.num_examples,
            "nodes": list(roster.nodes.items()),
            "registered": sorted(roster.registered),
            "label_counts": roster.label_counts,
            "connected": roster.connected,
            "failures": [(*which, count) for which, count in self.failures.counts.items()],
            "weights": self.weights,
            "metrics": {
                stage: [(t, None if found is None else dict(found)) for t, found in rounds.items()]
                for stage, rounds in self.metrics.items()
            },
        }

    def _resume(self, tensors: Tensors, about: Mapping[str, Any]) -> None:
        """Go on from what `to_parts` gave; an exception of `io.safetensors.UNREADABLE` where it did not."""
        server = ServerState.from_tensors(tensors, self.server.model.device)
        if server.model.shape != self.server.model.shape or len(server.optimizer) != len(self.server.optimizer):
            raise ValueError("it is of another model")
        self.counters = {
            name: tensors[f"counter-{i}"].numpy().reshape(self.layout.shapes[name])
            for i, name in enumerate(self.counters)
        }
        self.types = {name: np.dtype(str(about["types"][name])) for name in self.layout.shapes}
        self.log_norms = [
            tensors[f"log_norms-{t}"] for t in range(sum(name.startswith("log_norms-") for name in tensors))
        ]
        self.rule_state = from_plain(about["rule"], tensors)
        self.roster = Roster(
            {str(name): float(count) for name, count in about["num_examples"].items()},
            {int(node): str(name) for node, name in about["nodes"]},
            set(map(str, about["registered"])),
            {str(name): tuple(map(int, counts)) for name, counts in about["label_counts"].items()},
            {str(name): int(t) for name, t in about["connected"].items()},
        )
        counts = {(str(name), cast(FailureKind, str(kind))): int(count) for name, kind, count in about["failures"]}
        self.failures = Failures(Counter(counts))
        self.weights = [{str(name): float(weight) for name, weight in row.items()} for row in about["weights"]]
        self.metrics = {
            stage: {int(t): None if found is None else MetricRecord(found) for t, found in about["metrics"][stage]}
            for stage in get_args(Stage)
        }
        self.has_trained, self.problem = bool(about["has_trained"]), str(about["problem"])
        self.server, self.round = server, int(about["round"])
        self.server_round = self.resumed = int(about["server_round"])


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _widened(entry) for name, entry in value.items()}
    return [_widened(entry) for entry in value] if isinstance(value, list) else value

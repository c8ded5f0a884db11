"""Where a Flower strategy stands, in memory and in a checkpoint."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from fedunfold.engines.flower.roster import Roster
from fedunfold.engines.flower.wire import ModelArrays, RecordLayout
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
        messages: What clients were sent last.
        log_norms: Of every round those of the updates accepted (`aggregation.screening`).
        roster: The clients that have answered.
        failures: What went wrong with clients.
        weights: Θ of every round by client id.
        metrics: By stage and Flower's round, None where there were none.
        has_trained: Whether any round has trained the model.
        problem: Why the last round has not.
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
    messages: tuple[Message, ...] = ()
    log_norms: list[Tensor] = field(default_factory=list)
    roster: Roster = field(default_factory=Roster)
    failures: Failures = field(default_factory=Failures)
    weights: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[Stage, dict[int, MetricRecord | None]] = field(
        default_factory=lambda: {stage: {} for stage in get_args(Stage)}
    )
    has_trained: bool = False
    problem: str = ""
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
        return cls(layout, rule, ServerState.start(model.vector, algorithm), model.counters, model.types)

    @property
    def model(self) -> ModelArrays:
        """w^(t) and the counters."""
        return ModelArrays(self.server.model, self.counters, self.types)

    @property
    def arrays(self) -> ArrayRecord:
        """The model as clients are sent it."""
        return self.layout.record(self.model)

    def sender(self, reply: Message) -> int:
        """The node a reply is from; one that was lost comes as an error from no node, so what it replies to counts."""
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in self.messages}
        return asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)

    def widen(self) -> None:
        """Go on in double precision, with all that is compared with updates."""
        self.server, self.rule_state = self.server.widened(), _widened(self.rule_state)

    def rename(self, before: str, after: str) -> None:
        """Tell the rule that a client turns out to have another id."""
        if before != after:
            self.rule_state = renamed(self.rule, self.rule_state, before, after)

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
        tensors |= {f"counter-{i}": torch.from_numpy(values) for i, values in enumerate(self.counters.values())}
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

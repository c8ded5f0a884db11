"""Where federated runs stand, in memory and in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedunfold.aggregation.server_round import ServerState
from fedunfold.core.outcomes import Evaluation, RejectedUpdate
from fedunfold.core.own_layers import OwnEntries
from fedunfold.core.task import PrimaryMetric
from fedunfold.io.checkpoint import Checkpoint, Tensors
from fedunfold.io.plain_values import from_plain, to_plain


@dataclass(frozen=True)
class RunState:
    """After some rounds.

    Attributes:
        server: The server's model, its optimiser's state and its memory of clients' updates.
        rule: What the weighting rule remembers.
        weights: Θ of every round, [K].
        participated: Who participated in every round, [K].
        evaluations: The test after every round.
        log_norms: Of every round those of the updates accepted, [K] (`aggregation.screening`).
        rejected: Whose updates were rejected.
        clock: What the clock remembers.
        own: The clients' own layers, where some stay with them.
        times: When each step was made, in simulated seconds; empty where there is no time.
        staleness: The mean staleness of every step's updates; empty in synchronous rounds.
    """

    server: ServerState
    rule: Any = None
    weights: list[Tensor] = field(default_factory=list)
    participated: list[Tensor] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    log_norms: list[Tensor] = field(default_factory=list)
    rejected: list[RejectedUpdate] = field(default_factory=list)
    clock: Any = None
    own: OwnEntries | None = None
    times: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.weights)

    def is_past(self, limit: float) -> bool:
        """Whether simulated time has come to a limit."""
        return bool(self.times) and self.times[-1] >= limit

    def _check(self) -> None:
        """ValueError where this is not the state of one run: rows [K] for every round."""
        reported = self.server.reported.values()
        rows = [row.shape for row in (*self.weights, *self.participated, *self.log_norms, *reported)]
        counts = {len(self.weights), len(self.participated), len(self.evaluations), len(self.log_norms)}
        counts |= {len(found) for found in (self.times, self.staleness) if found}
        if len(counts) > 1 or counts == {0} or len(set(rows)) > 1 or len(rows[0]) != 1:
            raise ValueError("its rounds are not alike")
        numbers = all(row.is_floating_point() for row in (*self.weights, *self.log_norms, *reported))
        if not (numbers and all(row.dtype == torch.bool for row in self.participated)):
            raise ValueError("its rounds are of other types")

    def to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and the rest in plain values."""
        tensors = {
            **self.server.to_tensors(),
            **({} if self.own is None else self.own.to_tensors()),
            "weights": torch.stack(self.weights),
            "participated": torch.stack(self.participated),
            "log_norms": torch.stack(self.log_norms),
        }
        tensors |= {f"classes-{t}": found.class_accuracy for t, found in enumerate(self.evaluations)}
        remembered: dict[str, Tensor] = {}
        states = {"rule": to_plain(self.rule, remembered), "clock": to_plain(self.clock, remembered)}
        tests = [(found.score, found.loss, dict(found.metrics)) for found in self.evaluations]
        rejected = [asdict(entry) for entry in self.rejected]
        primary = self.evaluations[-1].primary
        named = [primary.name, primary.greater_is_better, sorted(primary.percentages)]
        states |= {"times": self.times, "staleness": self.staleness}
        return tensors | remembered, states | {"tests": tests, "primary": named, "rejected": rejected}

    @classmethod
    def from_parts(cls, tensors: Tensors, about: Mapping[str, Any], device: torch.device) -> "RunState":
        name, greater_is_better, percentages = about["primary"]
        primary = PrimaryMetric(str(name), bool(greater_is_better), frozenset(map(str, percentages)))
        tests = [
            Evaluation(score, loss, tensors[f"classes-{t}"], {name: float(metrics[name]) for name in metrics}, primary)
            for t, (score, loss, metrics) in enumerate(about["tests"])
        ]
        state = cls(
            ServerState.from_tensors(tensors, device),
            from_plain(about["rule"], tensors),
            [*tensors["weights"]],
            [*tensors["participated"]],
            tests,
            [*tensors["log_norms"]],
            [RejectedUpdate(**entry) for entry in about["rejected"]],
            from_plain(about["clock"], tensors),
            OwnEntries.from_tensors(tensors, device),
            [float(time) for time in about["times"]],
            [float(mean) for mean in about["staleness"]],
        )
        state._check()
        return state


def save_states(checkpoint: Checkpoint, states: Sequence[RunState]) -> None:
    """Runs that are carried out together go into one file, so that they stay in the same round."""
    parts = [state.to_parts() for state in states]
    tensors = {f"{i}.{name}": tensor for i, (found, _) in enumerate(parts) for name, tensor in found.items()}
    checkpoint.save(tensors, [about for _, about in parts])


def load_states(checkpoint: Checkpoint, device: torch.device) -> list[RunState] | None:
    """Read what `save_states` wrote for the same runs, where there is such a file."""

    def parse(tensors: Tensors, about: Sequence[Mapping[str, Any]]) -> list[RunState]:
        found = []
        for i, rest in enumerate(about):
            own = {name.removeprefix(f"{i}."): t for name, t in tensors.items() if name.startswith(f"{i}.")}
            found.append(RunState.from_parts(own, rest, device))
        return found

    return checkpoint.load(parse)

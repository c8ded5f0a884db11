"""Where federated runs stand, in memory and in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedunfold.aggregation.server_round import ServerState
from fedunfold.core.errors import InputError
from fedunfold.core.messages import Evaluation, RejectedUpdate
from fedunfold.core.task import PrimaryMetric
from fedunfold.io.checkpoint import Checkpoint, Tensors

TENSOR = "tensor"
"""The key of a dict that stands for a tensor in what a rule or a clock remembers."""


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
    """

    server: ServerState
    rule: Any = None
    weights: list[Tensor] = field(default_factory=list)
    participated: list[Tensor] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    log_norms: list[Tensor] = field(default_factory=list)
    rejected: list[RejectedUpdate] = field(default_factory=list)
    clock: Any = None

    @property
    def rounds(self) -> int:
        return len(self.weights)

    def _check(self) -> None:
        """ValueError where this is not the state of one run: vectors [d] of floats, and rows [K] for every round."""
        server = self.server
        vectors = [server.model, *server.optimizer, *server.memory.values()]
        vectors += [] if server.direction is None else [server.direction]
        if not all(v.dim() == 1 and v.shape == server.model.shape and v.is_floating_point() for v in vectors):
            raise ValueError("its vectors are not alike")
        rows = [row.shape for row in (*self.weights, *self.participated, *self.log_norms)]
        counts = {len(self.weights), len(self.participated), len(self.evaluations), len(self.log_norms)}
        if len(counts) > 1 or counts == {0} or len(set(rows)) > 1 or len(rows[0]) != 1:
            raise ValueError("its rounds are not alike")
        numbers = all(row.is_floating_point() for row in (*self.weights, *self.log_norms))
        if not (numbers and all(row.dtype == torch.bool for row in self.participated)):
            raise ValueError("its rounds are of other types")

    def to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and the rest in plain values."""
        server = self.server
        tensors = {
            "model": server.model,
            "weights": torch.stack(self.weights),
            "participated": torch.stack(self.participated),
            "log_norms": torch.stack(self.log_norms),
        }
        if server.direction is not None:
            tensors["direction"] = server.direction
        tensors |= {f"moment-{i}": moment for i, moment in enumerate(server.optimizer)}
        tensors |= {f"update-{k}": update for k, update in server.memory.items()}
        tensors |= {f"classes-{t}": found.class_accuracy for t, found in enumerate(self.evaluations)}
        remembered: dict[str, Tensor] = {}
        states = {"rule": _plain(self.rule, remembered), "clock": _plain(self.clock, remembered)}
        tests = [(found.score, found.loss, dict(found.metrics)) for found in self.evaluations]
        rejected = [asdict(entry) for entry in self.rejected]
        primary = self.evaluations[-1].primary
        named = [primary.name, primary.greater_is_better, sorted(primary.percentages)]
        return tensors | remembered, states | {"tests": tests, "primary": named, "rejected": rejected}

    @classmethod
    def from_parts(cls, tensors: Tensors, about: Mapping[str, Any], device: torch.device) -> "RunState":
        name, greater_is_better, percentages = about["primary"]
        primary = PrimaryMetric(str(name), bool(greater_is_better), frozenset(map(str, percentages)))
        tests = [
            Evaluation(score, loss, tensors[f"classes-{t}"], {name: float(metrics[name]) for name in metrics}, primary)
            for t, (score, loss, metrics) in enumerate(about["tests"])
        ]
        moments = [
            tensors[f"moment-{i}"].to(device) for i in range(sum(name.startswith("moment-") for name in tensors))
        ]
        memory = {int(n.removeprefix("update-")): t.to(device) for n, t in tensors.items() if n.startswith("update-")}
        direction = tensors["direction"].to(device) if "direction" in tensors else None
        state = cls(
            ServerState(tensors["model"].to(device), tuple(moments), memory, direction),
            _restored(about["rule"], tensors),
            [*tensors["weights"]],
            [*tensors["participated"]],
            tests,
            [*tensors["log_norms"]],
            [RejectedUpdate(**entry) for entry in about["rejected"]],
            _restored(about["clock"], tensors),
        )
        state._check()
        return state


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What a rule or a clock remembers in plain values; tensors go into `tensors`, and a name stands in their place."""
    if isinstance(value, Tensor):
        name = f"remembered-{len(tensors)}"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InputError("the state of a rule or a clock is saved only where its dicts have strings as keys.")
        return {key: _plain(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, tensors) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        "the state of a rule or a clock is saved only where it is made of numbers, strings, tensors, lists and dicts, "
        f"not of {type(value).__name__}."
    )


def _restored(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: _restored(entry, tensors) for key, entry in value.items()}
    return [_restored(entry, tensors) for entry in value] if isinstance(value, list) else value


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

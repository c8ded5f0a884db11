"""Where federated runs stand, in memory and in a checkpoint."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedunfold.aggregation.screening import RejectedUpdate
from fedunfold.core.errors import InputError
from fedunfold.core.federation import Evaluation
from fedunfold.io.checkpoint import Checkpoint, Tensors


@dataclass(frozen=True)
class RunState:
    """After some rounds: the server's model, its optimiser's moments and its memory of clients' updates, what the
    weighting rule remembers, and what was seen in every round."""

    model: Tensor
    moments: tuple[Tensor, ...]
    memory: Mapping[int, Tensor] = field(default_factory=dict)
    rule: Any = None
    weights: list[Tensor] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    rejected: list[RejectedUpdate] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.weights)

    def _check(self) -> None:
        """ValueError where this is not the state of one run: vectors [d] of floats, and rows [K] for every round."""
        vectors = (self.model, *self.moments, *self.memory.values())
        if not all(v.dim() == 1 and v.shape == self.model.shape and v.is_floating_point() for v in vectors):
            raise ValueError("its vectors are not alike")
        rows = [row.shape for row in (*self.weights, *self.present, *self.lengths)]
        counts = {len(self.weights), len(self.present), len(self.evaluations), len(self.lengths)}
        if len(counts) > 1 or counts == {0} or len(set(rows)) > 1 or len(rows[0]) != 1:
            raise ValueError("its rounds are not alike")
        numbers = (*self.weights, *self.lengths)
        if any(row.dtype != torch.bool for row in self.present) or any(not row.is_floating_point() for row in numbers):
            raise ValueError("its rounds are of other types")

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and the rest in plain values."""
        tensors = {"model": self.model, "weights": torch.stack(self.weights), "present": torch.stack(self.present)}
        tensors["lengths"] = torch.stack(self.lengths)
        tensors |= {f"moment-{i}": moment for i, moment in enumerate(self.moments)}
        tensors |= {f"update-{k}": update for k, update in self.memory.items()}
        tensors |= {f"classes-{t}": found.class_accuracy for t, found in enumerate(self.evaluations)}
        try:
            rule = json.loads(json.dumps(self.rule))
        except TypeError as error:
            raise InputError(f"a rule's state is kept only where it is plain numbers and names: {error}.") from error
        tests = [(found.accuracy, found.loss) for found in self.evaluations]
        return tensors, {"rule": rule, "tests": tests, "rejected": [asdict(entry) for entry in self.rejected]}

    @classmethod
    def of_parts(cls, tensors: Tensors, about: Mapping[str, Any], device: torch.device) -> "RunState":
        tests = [
            Evaluation(accuracy, loss, tensors[f"classes-{t}"]) for t, (accuracy, loss) in enumerate(about["tests"])
        ]
        moments = [
            tensors[f"moment-{i}"].to(device) for i in range(sum(name.startswith("moment-") for name in tensors))
        ]
        memory = {int(n.removeprefix("update-")): t.to(device) for n, t in tensors.items() if n.startswith("update-")}
        model, weights, present = tensors["model"].to(device), [*tensors["weights"]], [*tensors["present"]]
        lengths, rejected = [*tensors["lengths"]], [RejectedUpdate(**entry) for entry in about["rejected"]]
        state = cls(model, tuple(moments), memory, about["rule"], weights, present, tests, lengths, rejected)
        state._check()
        return state


def save_states(checkpoint: Checkpoint, states: Sequence[RunState]) -> None:
    """Runs in step go into one file, so that they stay in step."""
    parts = [state.parts() for state in states]
    tensors = {f"{i}.{name}": tensor for i, (found, _) in enumerate(parts) for name, tensor in found.items()}
    checkpoint.save(tensors, [about for _, about in parts])


def load_states(checkpoint: Checkpoint, device: torch.device) -> list[RunState] | None:
    """Read what `save_states` wrote for the same runs, where there is such a file."""

    def parse(tensors: Tensors, about: Sequence[Mapping[str, Any]]) -> list[RunState]:
        found = []
        for i, rest in enumerate(about):
            own = {name.removeprefix(f"{i}."): t for name, t in tensors.items() if name.startswith(f"{i}.")}
            found.append(RunState.of_parts(own, rest, device))
        return found

    return checkpoint.load(parse)


def fingerprint(tensor: Tensor) -> str:
    """Stands for a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()

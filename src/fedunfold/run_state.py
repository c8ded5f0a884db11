"""Where a federated run stands, in a file that a later call goes on from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.errors import InputError
from fedunfold.federation import Evaluation
from fedunfold.files import write_atomically
from fedunfold.tensor_files import UNREADABLE, open_tensors


@dataclass
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

    @property
    def rounds(self) -> int:
        return len(self.weights)

    def _check(self) -> None:
        """ValueError where this is not the state of one run: vectors [d] of floats, and rows [K] for every round."""
        vectors = (self.model, *self.moments, *self.memory.values())
        if not all(v.dim() == 1 and v.shape == self.model.shape and v.is_floating_point() for v in vectors):
            raise ValueError("its vectors are not alike")
        rows = [row.shape for row in (*self.weights, *self.present)]
        counts = {len(self.weights), len(self.present), len(self.evaluations)}
        if len(counts) > 1 or counts == {0} or len(set(rows)) > 1 or len(rows[0]) != 1:
            raise ValueError("its rounds are not alike")
        if any(row.dtype != torch.bool for row in self.present) or any(not w.is_floating_point() for w in self.weights):
            raise ValueError("its rounds are of other types")

    def save(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Write it, with what it belongs to."""
        tensors = {"model": self.model, "weights": torch.stack(self.weights), "present": torch.stack(self.present)}
        tensors |= {f"moment-{i}": moment for i, moment in enumerate(self.moments)}
        tensors |= {f"update-{k}": update for k, update in self.memory.items()}
        tensors |= {f"classes-{t}": found.class_accuracy for t, found in enumerate(self.evaluations)}
        try:
            rule = json.dumps(self.rule)
        except TypeError as error:
            raise InputError(f"a rule's state is kept only where it is plain numbers and names: {error}.") from error
        tests = [(found.accuracy, found.loss) for found in self.evaluations]
        about = {"identity": identity, "rule": json.loads(rule), "tests": tests}
        content = serialize({n: t.cpu().contiguous() for n, t in tensors.items()}, {"fedunfold": json.dumps(about)})
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: Path, identity: Mapping[str, Any], device: torch.device) -> "RunState":
        """Read what `save` wrote for the same run; that of another one is refused."""
        try:
            with open_tensors(path, "pt") as file:
                about = json.loads((file.metadata() or {})["fedunfold"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            tests = [
                Evaluation(accuracy, loss, tensors[f"classes-{t}"]) for t, (accuracy, loss) in enumerate(about["tests"])
            ]
            model = tensors["model"].to(device)
            moments = [tensors[f"moment-{i}"].to(device) for i in range(_count(tensors, "moment-"))]
            memory = {
                int(n.removeprefix("update-")): t.to(device) for n, t in tensors.items() if n.startswith("update-")
            }
            state = cls(
                model, tuple(moments), memory, about["rule"], [*tensors["weights"]], [*tensors["present"]], tests
            )
            state._check()
            belongs_to = about["identity"]
        except UNREADABLE as error:
            raise InputError(f"checkpoint {path} is damaged; delete it to begin the run again.") from error
        if belongs_to != json.loads(json.dumps(identity)):
            raise InputError(f"checkpoint {path} is of another run; delete it, or choose another file.")
        return state


def fingerprint(tensor: Tensor) -> str:
    """Stands for a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _count(names: Sequence[str] | Mapping[str, Any], prefix: str) -> int:
    return sum(name.startswith(prefix) for name in names)

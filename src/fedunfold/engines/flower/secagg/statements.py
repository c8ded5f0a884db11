"""What the members of a sum agree on: that they were sent the same, and by how much each of them counts."""

from hashlib import sha256

from torch import Tensor

from fedunfold.engines.flower.schema import Arrays, TrainInstruction
from fedunfold.engines.flower.secagg.keys import digest

OWN = frozenset({"epochs", "trains", "step_scale", "update_scale", "control_round"})
"""What an instruction says to one client alone."""
NAMES = frozenset({"run", "round"})
ADJOINT = "adjoint"
"""The array that differs from client to client."""


def common_request(instruction: TrainInstruction, arrays: Arrays) -> bytes:
    """The digest of what all members of a sum have to be sent alike: the model above all."""
    return _request(instruction, {name: array for name, array in arrays.items() if name != ADJOINT}, OWN)


def own_request(instruction: TrainInstruction, arrays: Arrays, *, named: bool = True) -> bytes:
    """The digest of all that determines a client's vector.

    Args:
        instruction: What it is to do.
        arrays: What comes with that.
        named: Whether the names of run and round count too; the same model gives much the same vector under others.
    """
    return _request(instruction, arrays, frozenset() if named else NAMES)


def model_digest(model: Tensor) -> bytes:
    """Stands for a model, to the last bit."""
    values = model.detach().cpu().contiguous()
    return digest(str(values.dtype), sha256(values.numpy().tobytes()).digest())


def scale_of(instruction: TrainInstruction, arrays: Arrays, array: str, weight: float) -> float:
    """By how much a client counts in a sum: its weight, times what the server puts on its training or its adjoint.

    updates  c_k · (scale of its steps) · (scale of its update) · E_k
    adjoint  c_k · (1 + (scale of its steps) · (scale of its update) · ‖q_k‖)
    """
    training = instruction.step_scale * instruction.update_scale
    if array == "updates":
        return weight * training * instruction.epochs
    if array == ADJOINT:
        return weight * (1 + training * float(arrays[ADJOINT].double().norm()))
    return weight


def _request(instruction: TrainInstruction, arrays: Arrays, without: frozenset[str]) -> bytes:
    parts: list[bytes | str] = [instruction.model_dump_json(exclude=set(without))]
    for name in sorted(arrays):
        parts += [name, str(list(arrays[name].shape)), model_digest(arrays[name])]
    return digest(*parts)

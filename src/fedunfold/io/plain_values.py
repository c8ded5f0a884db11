"""What a rule or a clock remembers, as JSON values and tensors beside them, the two parts of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedunfold.core.errors import InputError

TENSOR = "tensor"
"""The key of a dict that stands for a tensor."""


def to_plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A state in plain values.

    Args:
        value: Made of numbers, strings, tensors, lists and dicts.
        tensors: Where its tensors go; a name stands in their place.

    >>> import torch
    >>> tensors = {}
    >>> to_plain({"norm": 0.5, "previous": torch.zeros(2)}, tensors)
    {'norm': 0.5, 'previous': {'tensor': 'remembered-0'}}
    >>> from_plain(_, tensors)
    {'norm': 0.5, 'previous': tensor([0., 0.])}
    """
    if isinstance(value, Tensor):
        name = f"remembered-{len(tensors)}"
        tensors[name] = value.detach().clone()  # a state may hold the same one twice, and a file has each by itself
        return {TENSOR: name}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InputError("the state of a rule or a clock is saved only where its dicts have strings as keys.")
        return {key: to_plain(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry, tensors) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        "the state of a rule or a clock is saved only where it is made of numbers, strings, tensors, lists and dicts, "
        f"not of {type(value).__name__}."
    )


def from_plain(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: from_plain(entry, tensors) for key, entry in value.items()}
    return [from_plain(entry, tensors) for entry in value] if isinstance(value, list) else value

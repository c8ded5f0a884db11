"""What a model reads: one tensor, or several by name, the row on the leading axis of each."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedunfold.core.errors import InputError

Inputs = Tensor | Mapping[str, Tensor]


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to every tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}


def take(inputs: Inputs, rows: "Tensor | slice | tuple[int, slice]") -> Inputs:
    """Some rows."""
    return map_inputs(lambda t: t[rows], inputs)


def tensors(inputs: Inputs) -> list[Tensor]:
    """All of them."""
    return [inputs] if isinstance(inputs, Tensor) else list(inputs.values())


def cast(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """On a device, numbers with a fraction in a type; ids and masks stay what they are."""
    return map_inputs(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype).contiguous(), inputs)


def single(inputs: Inputs) -> Tensor:
    """The one tensor that they are."""
    if not isinstance(inputs, Tensor):
        raise InputError(f"this needs one array as inputs, and there are {', '.join(inputs)}.")
    return inputs


def call_model(module: Callable[..., object] | nn.Module, inputs: Inputs) -> object:
    """A model's outputs; tensors by name are passed by name."""
    return module(inputs) if isinstance(inputs, Tensor) else module(**inputs)

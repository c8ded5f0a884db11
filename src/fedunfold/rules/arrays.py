"""One formula for tensors, through which a gradient flows, and for NumPy arrays, whose operations take a fraction of
the time where they are small."""

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[Any])


def functions_of(values: Tensor | NDArray[Any]) -> Any:
    """torch or numpy: those of their functions that have one name in both work on these values.

    >>> functions_of(np.ones(2)).tanh(np.zeros(2)).tolist(), functions_of(torch.ones(2)).tanh(torch.zeros(2)).tolist()
    ([0.0, 0.0], [0.0, 0.0])
    """
    return torch if isinstance(values, Tensor) else np


def softmax(logits: Array) -> Array:
    """e^x_i / Σ_j e^x_j over the last dimension."""
    functions = functions_of(logits)
    powers: Array = functions.exp(logits - functions.amax(logits, -1)[..., None])
    shares: Array = powers / powers.sum(-1)[..., None]
    return shares


def numbers_of(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    """The values alone, without what leads to them."""
    return values.numpy(force=True) if isinstance(values, Tensor) else values

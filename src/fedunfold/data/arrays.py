"""What a model reads, and the checks that every array passes, whether it comes from a file or a caller.

Each array comes with a name for messages, such as "x of client site-a" or "x_train in own.npz".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedunfold.core.errors import InputError
from fedunfold.tasks.classification import class_numbers

Arrays = ArrayLike | Mapping[str, ArrayLike]
"""What a model reads: one array, or several by name."""
Features = NDArray[np.float32]
Labels = NDArray[np.int64]


def as_array(value: ArrayLike, name: str) -> NDArray[Any]:
    """A value as a numpy array.

    Args:
        value: An array, tensor or nested list.
        name: What messages call it.

    Returns:
        The array.

    Raises:
        InputError: It is ragged, or a tensor that numpy cannot read.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{name} is not a plain numeric array ({reason}).") from error


def all_inputs(named: Mapping[str, Arrays], *, keep_integers: bool) -> list[dict[str, NDArray[Any]]]:
    """The inputs of all clients and of the test set, checked; one array has the name "".

    Args:
        named: Them by what messages call them.
        keep_integers: Whether whole numbers are ids; among several arrays by name they always are.

    Raises:
        InputError: An array cannot be used; the message names it.
    """
    first_name, first = next(iter(named.items()))
    if not isinstance(first, Mapping):
        arrays = {name: value for name, value in named.items() if not isinstance(value, Mapping)}
        if len(arrays) < len(named):
            raise InputError(f"{first_name} is one array, and others are several by name; give the same everywhere.")
        return [{"": rows} for rows in features(arrays, keep_integers=keep_integers).values()]
    parts: list[dict[str, NDArray[Any]]] = [{} for _ in named]
    for key in first:
        column: dict[str, ArrayLike] = {}
        for name, value in named.items():
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                raise InputError(f"{name} has other inputs than {first_name} ({', '.join(first)}); give the same ones.")
            column[f"'{key}' in {name}"] = value[key]
        for part, rows in zip(parts, features(column, keep_integers=True, axes=1).values(), strict=True):
            part[key] = rows
    for name, part in zip(named, parts, strict=True):
        if len({len(rows) for rows in part.values()}) > 1:
            raise InputError(f"{name} has inputs of different lengths; give one row of each to every sample.")
    return parts


def features(named: Mapping[str, ArrayLike], *, keep_integers: bool = False, axes: int = 2) -> dict[str, NDArray[Any]]:
    """All features of one federation or file as float32, rows of one common shape, every value finite.

    uint8 counts as image bytes and becomes x/255 in [0, 1]; any other number stays what it is. The two are
    not mixed, since clients on different scales would look like heterogeneous data.

    Args:
        named: The arrays by what messages call them.
        keep_integers: Whether whole numbers are ids and stay what they are, as int64.
        axes: The least number of axes.

    Returns:
        The checked arrays by the same names.

    Raises:
        InputError: An array cannot be used; the message names it and the row.
    """
    arrays = {name: as_array(value, name) for name, value in named.items()}
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.dtype.kind not in ("uifb" if keep_integers else "uif"):
            raise InputError(f"{name} has type {array.dtype}; give integers or floats.")
        if array.ndim < axes:
            raise InputError(f"{name} has shape {array.shape}; give [samples, features].")
        if array.size == 0:
            raise InputError(f"{name} is empty (shape {array.shape}); give at least one sample or leave it out.")
        if array.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{name} has rows of shape {array.shape[1:]} but {first_name} has {first.shape[1:]}; "
                "give the same features everywhere."
            )
        if (array.dtype == np.uint8) != (first.dtype == np.uint8):
            raise InputError(
                f"{name} has type {array.dtype} but {first_name} has {first.dtype}; "
                "use uint8 everywhere or nowhere, because only uint8 is scaled to [0, 1]."
            )
    if keep_integers and all(array.dtype.kind in "uib" for array in arrays.values()):
        return {name: array.astype(bool if array.dtype.kind == "b" else np.int64) for name, array in arrays.items()}
    return {name: _as_float32(array, name) for name, array in arrays.items()}


def _as_float32(array: NDArray[Any], name: str) -> Features:
    """The array on its scale, all values finite."""
    if array.dtype == np.uint8:
        return array.astype(np.float32) / np.float32(255)
    with np.errstate(over="ignore"):  # too large for float32 becomes inf and is named below
        result = array.astype(np.float32, copy=False)
    finite = np.isfinite(result).reshape(len(result), -1).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{name} has a NaN or infinite value in row {int(np.argmin(finite))}; fill it in or drop the row."
        )
    return result


def labels(value: ArrayLike, name: str, rows: int, classes: int | None = None) -> Labels:
    """Labels as int64.

    Args:
        value: Class numbers.
        name: What messages call them.
        rows: How many there must be.
        classes: Each must lie in [0, classes); without it, they must not be negative.

    Returns:
        The checked labels, [rows].

    Raises:
        InputError: They are none; the message names them.
    """
    array = as_array(value, name)
    if array.shape != (rows,):
        raise InputError(f"{name} has shape {array.shape} but its x has {rows} rows; give one label a row.")
    return class_numbers(array, name, classes)


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


def joined(parts: Sequence[Mapping[str, np.ndarray]]) -> Inputs:
    """The rows of all clients, one client after the other, in memory of their own."""
    together = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
    return together.get("", together)

"""Checks of targets that several tasks share; each refuses with one sentence that names the targets and the row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError


def class_numbers(targets: NDArray[Any], name: str, classes: int | None, ignored: int | None = None) -> NDArray[Any]:
    """Whole numbers from 0, below `classes` where that is given; `ignored` may stand in the place of one."""
    if targets.dtype.kind not in "ui":
        raise InputError(f"{name} has type {targets.dtype}; give class numbers as integers from 0.")
    real = targets if ignored is None else targets[targets != ignored]
    if not real.size:
        raise InputError(f"{name} has no class number; give at least one.")
    lowest, highest = int(real.min()), int(real.max())
    if lowest < 0:
        raise InputError(f"{name} has the label {lowest}; number the classes from 0.")
    if classes is not None and highest >= classes:
        raise InputError(f"{name} has the label {highest} but there are {classes} classes (0 to {classes - 1}).")
    return targets.astype(np.int64, copy=False)


def finite_numbers(targets: NDArray[Any], name: str) -> NDArray[Any]:
    """Numbers as float32, all of them finite."""
    if targets.dtype.kind not in "uifb":
        raise InputError(f"{name} has type {targets.dtype}; give numbers.")
    result = targets.astype(np.float32)
    finite = np.isfinite(result).reshape(len(result), -1).all(axis=1)
    if not finite.all():
        raise InputError(f"{name} has a NaN or infinite value in row {int(np.argmin(finite))}; drop the row.")
    return result


def zeros_and_ones(targets: NDArray[Any], name: str, what: str) -> NDArray[Any]:
    """Numbers that are 0 or 1, as float32."""
    numbers = finite_numbers(targets, name)
    odd = ((numbers != 0) & (numbers != 1)).reshape(len(numbers), -1).any(axis=1)
    if odd.any():
        row = int(np.argmax(odd))
        raise InputError(f"{name} has {what} that is neither 0 nor 1 in row {row}; code it as 0 or 1.")
    return numbers

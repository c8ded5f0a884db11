"""Features brought to one scale, and divided into rows for the clients and rows for the test."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.data.sources import Dataset
from fedunfold.data.vision.files import Features


def unit(x: NDArray[np.float32], name: Callable[[int], str] = "row {}".format) -> NDArray[np.float32]:
    """Every row over its root mean square, x / √(mean_j x_j²).

    Args:
        x: Features [N, D].
        name: What messages call a row.

    Returns:
        Rows of a mean square of 1; a row of zeros stays one.
    """
    with np.errstate(over="ignore"):  # what is too large to be squared is named below
        scale = np.sqrt(np.square(x).mean(1, keepdims=True))
    finite = np.isfinite(scale)
    if not finite.all():
        raise InputError(
            f"the features of {name(int(np.argmin(finite)))} are too large to be scaled; use scaling 'none'."
        )
    result: NDArray[np.float32] = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    return result


def unit_rows(features: Features) -> Features:
    """The features with every row brought to a root mean square of 1."""
    return replace(features, x=unit(features.x, lambda row: str(features.names[row])))


def held_out(
    y: NDArray[np.int64], classes: Sequence[str], fraction: float, seed: int, purpose: str, *parts: str
) -> NDArray[np.bool_]:
    """Draw a part of the rows of each class.

    Args:
        y: Class numbers [N].
        classes: The classes' names.
        fraction: Of the n rows of a class, fraction·n; half a row is rounded up, but one row is always left.
        seed: Draws them, by (seed, purpose, class name).
        purpose: What they are drawn for.
        *parts: What else tells the draw from others.

    Returns:
        Which rows were drawn, [N].
    """
    mask = np.zeros(len(y), dtype=bool)
    for label, name in enumerate(classes):
        rows = np.flatnonzero(y == label)
        # Rounding first: in floating point a product may lie a hair below the half it stands for.
        count = math.floor(round(fraction * len(rows), 9) + 0.5)
        chosen = generator(seed, purpose, *parts, name).permutation(rows)
        mask[chosen[: min(count, len(rows) - 1)] if len(rows) else rows] = True
    return mask


def split(features: Features, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Divide features into rows to train and to test on; the draw of a class does not depend on the others.

    Args:
        features: All rows.
        test_fraction: The part of each class to test on.
        seed: Draws it.

    Returns:
        Both parts, rows in their order.
    """
    if not 0 < test_fraction < 1:
        raise InputError(f"The test fraction must lie between 0 and 1, not {test_fraction}.")
    test = held_out(features.y, features.classes, test_fraction, seed, "features-test")
    if not test.any():
        raise InputError(
            f"A test fraction of {test_fraction:g} leaves no test row in classes this small; "
            "raise the fraction or give more images."
        )
    x, y = features.x, features.y
    return Dataset(x[~test], y[~test], x[test], y[test])

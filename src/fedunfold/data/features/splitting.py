"""Features brought to one scale, and divided into rows for the clients and rows for the test."""

import math
from dataclasses import replace

import numpy as np

from fedunfold.data.features.files import Features
from fedunfold.data.sources import Dataset
from fedunfold.errors import InputError
from fedunfold.randomness import generator


def unit_rows(features: Features) -> Features:
    """Every row over its root mean square, √(mean_j x_j²); a row of zeros stays one."""
    x = features.x
    with np.errstate(over="ignore"):  # what is too large to be squared is named below
        scale = np.sqrt(np.square(x).mean(1, keepdims=True))
    finite = np.isfinite(scale)
    if not finite.all():
        name = features.names[int(np.argmin(finite))]
        raise InputError(f"the features of {name} are too large to be scaled; make them again, or use scaling 'none'.")
    return replace(features, x=np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))


def split(features: Features, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Of the n rows of each class, `test_fraction`·n, rounded, are for the test and the others for training.

    Which ones is drawn by (seed, class name), so that it does not depend on the other classes. Half a row is
    rounded up, but a class with any rows keeps at least one for training. Rows stay in their order.
    """
    if not 0 < test_fraction < 1:
        raise InputError(f"The test fraction must lie between 0 and 1, not {test_fraction}.")
    held_out = np.zeros(len(features.y), dtype=bool)
    for label, name in enumerate(features.classes):
        rows = np.flatnonzero(features.y == label)
        # Rounding first: in floating point a product may lie a hair below the half it stands for.
        count = math.floor(round(test_fraction * len(rows), 9) + 0.5)
        chosen = generator(seed, "features-test", name).permutation(rows)
        held_out[chosen[: min(count, len(rows) - 1)] if len(rows) else rows] = True
    if not held_out.any():
        raise InputError(
            f"A test fraction of {test_fraction:g} leaves no test row in classes this small; "
            "raise the fraction or give more images."
        )
    x, y = features.x, features.y
    return Dataset(x[~held_out], y[~held_out], x[held_out], y[held_out])

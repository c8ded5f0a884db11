"""Generated pictures: every class is a stroke, of which each sample shows a shifted, shaken and noisy version.

x = low + (high − low) · (max_j exp(−‖pixel − c_j‖² / 2σ²) + noise),   c_j along the class's curve

As in scanned writing, most pixels are background, and of one value, which makes their mean as large as what matters.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOBS = 9
"""How many points of a curve are drawn."""


@dataclass(frozen=True)
class Pictures:
    """A drawn problem, which gives as many samples as are wanted.

    Attributes:
        curves: c, [classes, BLOBS, 2], in units of the side.
        side: Of a square picture, in pixels.
        thickness: σ, in pixels.
        shift: By how much a sample is moved, in pixels.
        shake: By how much each of its points is, in pixels.
        noise: Standard deviation of every pixel.
        low: The background.
        high: The stroke.
    """

    curves: NDArray[np.float64]
    side: int
    thickness: float
    shift: float
    shake: float
    noise: float
    low: float
    high: float

    @classmethod
    def draw(cls, rng: np.random.Generator, classes: int) -> "Pictures":
        """A problem with so many classes."""
        side = int(rng.integers(8, 15))
        corners = rng.uniform(0.15, 0.85, (classes, 4, 2))
        along = np.linspace(0, 3, BLOBS)
        first = np.minimum(along.astype(int), 2)
        part = (along - first)[:, None]
        low, high = [(-1.0, 1.0), (0.0, 1.0), (-0.5, 3.0)][int(rng.integers(3))]
        return cls(
            curves=(1 - part) * corners[:, first] + part * corners[:, first + 1],
            side=side,
            thickness=side * rng.uniform(0.05, 0.1),
            shift=side * rng.uniform(0.0, 0.1),
            shake=side * rng.uniform(0.01, 0.06),
            noise=rng.uniform(0.0, 0.15),
            low=low,
            high=high,
        )

    def sample(self, rng: np.random.Generator, labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """A picture for every label, [n, side²]."""
        count = len(labels)
        points = self.side * self.curves[labels] + self.shift * rng.normal(size=(count, 1, 2))
        points = points + self.shake * rng.normal(size=points.shape)
        pixels = np.arange(self.side) + 0.5
        # A Gaussian is a product over both directions.
        rows, columns = (
            np.exp(-np.square(points[:, :, axis, None] - pixels) / 2 / self.thickness**2) for axis in (0, 1)
        )
        ink = (rows[:, :, :, None] * columns[:, :, None, :]).max(1).reshape(count, -1)
        ink = np.clip(ink + self.noise * rng.normal(size=ink.shape), 0, 1)
        seen: NDArray[np.float64] = self.low + (self.high - self.low) * ink
        return seen.astype(np.float32)

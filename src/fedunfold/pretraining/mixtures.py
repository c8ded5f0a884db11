"""Generated classification data: every class is a mixture of clouds in a small space, seen through a random map.

x = scale · (g(z A) + offset + noise),   z ~ N(c_{y, j}, I),   j one of the class's clouds,   g linear or tanh
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """A drawn problem, which gives as many samples as are wanted.

    Attributes:
        centres: c, [classes, clouds, latent].
        mapping: A, [latent, features].
        offset: [features].
        noise: Its standard deviation in every feature.
        bends: Whether g is tanh.
        scale: Of all features.
    """

    centres: NDArray[np.float64]
    mapping: NDArray[np.float64]
    offset: NDArray[np.float64]
    noise: float
    bends: bool
    scale: float

    @classmethod
    def draw(cls, rng: np.random.Generator, classes: int, features: int) -> "Mixture":
        """A problem with so many classes and features."""
        latent, clouds = int(rng.integers(4, 13)), int(rng.integers(1, 4))
        distance = rng.uniform(0.6, 2.2)
        return cls(
            centres=distance * rng.normal(size=(classes, clouds, latent)),
            mapping=rng.normal(size=(latent, features)) / np.sqrt(latent),
            offset=rng.choice([0.0, 0.5, 1.5]) * rng.normal(size=features),
            noise=rng.uniform(0.1, 0.8),
            bends=bool(rng.random() < 0.5),
            scale=float(np.exp(rng.uniform(-1.5, 0.5))),
        )

    def sample(
        self, rng: np.random.Generator, labels: NDArray[np.int64], shift: NDArray[np.float64] | None = None
    ) -> NDArray[np.float32]:
        """A sample for every label; `shift` moves all of them in the latent space, as a client's own conditions do."""
        clouds = rng.integers(self.centres.shape[1], size=len(labels))
        latent = self.centres[labels, clouds] + rng.normal(size=(len(labels), self.centres.shape[2]))
        if shift is not None:
            latent = latent + shift
        seen = latent @ self.mapping
        seen = (np.tanh(seen) if self.bends else seen) + self.offset + self.noise * rng.normal(size=seen.shape)
        return (self.scale * seen).astype(np.float32)

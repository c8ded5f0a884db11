"""Generated classification data: every class is a mixture of clouds in a small space, seen through a random map.

x = scale · h(g(z A) + offset + noise),   z ~ N(c_{y, j}, I),   j one of the class's clouds,   g linear or tanh,
h the identity, or what makes columns of a table (`columns`)
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedunfold.pretraining.columns import Columns

REFERENCE = 1000
"""How many samples the columns of a table are standardised by."""


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
        columns: What makes the features those of a table.
    """

    centres: NDArray[np.float64]
    mapping: NDArray[np.float64]
    offset: NDArray[np.float64]
    noise: float
    bends: bool
    scale: float
    columns: Columns | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator, classes: int, features: int, table: bool = False) -> "Mixture":
        """A problem with so many classes and features, those of a table or all of one kind."""
        latent, clouds = int(rng.integers(4, 13)), int(rng.integers(1, 4))
        distance = rng.uniform(0.6, 2.2)
        plain = cls(
            centres=distance * rng.normal(size=(classes, clouds, latent)),
            mapping=rng.normal(size=(latent, features)) / np.sqrt(latent),
            offset=rng.choice([0.0, 0.5, 1.5]) * rng.normal(size=features),
            noise=rng.uniform(0.1, 0.8),
            bends=bool(rng.random() < 0.5),
            scale=float(np.exp(rng.uniform(-1.5, 0.5))),
        )
        if not table:
            return plain
        return replace(plain, columns=Columns.draw(rng, plain._seen(rng, rng.integers(classes, size=REFERENCE))))

    def sample(
        self, rng: np.random.Generator, labels: NDArray[np.int64], shift: NDArray[np.float64] | None = None
    ) -> NDArray[np.float32]:
        """A sample for every label; `shift` moves all of them in the latent space, as a client's own conditions do."""
        seen = self._seen(rng, labels, shift)
        return (self.scale * (seen if self.columns is None else self.columns.of(seen))).astype(np.float32)

    def _seen(
        self, rng: np.random.Generator, labels: NDArray[np.int64], shift: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        clouds = rng.integers(self.centres.shape[1], size=len(labels))
        latent = self.centres[labels, clouds] + rng.normal(size=(len(labels), self.centres.shape[2]))
        if shift is not None:
            latent = latent + shift
        seen: NDArray[np.float64] = latent @ self.mapping
        return (np.tanh(seen) if self.bends else seen) + self.offset + self.noise * rng.normal(size=seen.shape)

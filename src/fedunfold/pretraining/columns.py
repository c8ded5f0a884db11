"""The columns of a generated table: some have long tails, some are yes or no, and all have mean 0 and deviation 1.

x_i = (h_i(v_i) − mean) / deviation,   h_i(v) one of v, e^{0.7 (v − centre_i)/spread_i} and [v > q_i]
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Kinds = NDArray[np.int64]
AS_IT_IS, LONG_TAIL, YES_OR_NO = range(3)
TAIL = 0.7
TINY = 1e-6


@dataclass(frozen=True)
class Columns:
    """What becomes of numbers in a table.

    Attributes:
        kinds: Which h_i, [features].
        centres: Mean v, [features].
        spreads: Standard deviation of v, [features].
        thresholds: q, [features].
        means: Of h(v), [features].
        deviations: Of h(v), [features].
    """

    kinds: Kinds
    centres: NDArray[np.float64]
    spreads: NDArray[np.float64]
    thresholds: NDArray[np.float64]
    means: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    deviations: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))

    @classmethod
    def draw(cls, rng: np.random.Generator, rows: NDArray[np.float64]) -> "Columns":
        """Columns for rows such as these, v [n, features]: of those that are yes or no, 2 to 50 % are yes."""
        features = rows.shape[1]
        kinds = rng.choice([AS_IT_IS, LONG_TAIL, YES_OR_NO], size=features, p=[0.5, 0.25, 0.25])
        parts = rng.uniform(0.5, 0.98, size=(features,))
        thresholds = np.array([np.quantile(rows[:, i], part) for i, part in enumerate(parts)])
        plain = cls(kinds, rows.mean(0), rows.std(0) + TINY, thresholds)
        values = plain.of(rows)
        return replace(plain, means=values.mean(0), deviations=values.std(0) + TINY)

    def of(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """x from v, [n, features]."""
        tails = np.exp(TAIL * (rows - self.centres) / self.spreads)
        above = (rows > self.thresholds).astype(np.float64)
        values = np.where(self.kinds == LONG_TAIL, tails, np.where(self.kinds == YES_OR_NO, above, rows))
        return (values - self.means) / self.deviations

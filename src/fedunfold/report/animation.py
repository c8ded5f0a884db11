"""The weights at every outer iteration, small enough for a page: the frames of a slider."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedunfold.report.learning import loss_in_words
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.schema import Floats

STEPS = 2**16 - 1
MOST_VALUES = 600_000  # 1.6 MB in the page
MOST_FRAMES = 101
OUTSTANDING = 0.003


@dataclass(frozen=True, eq=False)
class Frames:
    """Weights at some of the outer iterations.

    Attributes:
        values: Θ, [frames, T, K].
        captions: What the slider shows with each.
    """

    values: Floats
    captions: tuple[str, ...]

    @property
    def most(self) -> float:
        """The largest weight."""
        return float(self.values.max())

    @property
    def usual(self) -> float:
        """What nearly all weights are at most: a few that stand out must not make the others look alike."""
        return float(np.quantile(self.values, 1 - OUTSTANDING))

    def as_json(self) -> dict[str, Any]:
        """Weights as 16-bit parts of the largest, client by client: off by 1/131070 of it at most."""
        scale = self.most or 1.0
        parts = np.rint(self.values.clip(0) / scale * STEPS).astype("<u2").swapaxes(1, 2)
        return {
            "clients": parts.shape[1],
            "rounds": parts.shape[2],
            "unit": scale / STEPS,
            "captions": self.captions,
            "values": base64.b64encode(np.ascontiguousarray(parts).tobytes()).decode("ascii"),
        }


def of_learning(learned: LearnedWeights) -> Frames:
    """The history from the start to the end; evenly thinned out where all of it would be too much."""
    iterations, each = len(learned.losses), learned.weights.numel()
    count = min(iterations + 1, MOST_FRAMES, max(2, MOST_VALUES // each))
    chosen = np.unique(np.rint(np.linspace(0, iterations, count)).astype(int))
    captions = []
    for m in chosen.tolist():
        where = "Start" if m == 0 else f"After iteration {m} of {iterations}"
        captions.append(
            f"{where}, outer loss {loss_in_words(float(learned.losses[m]))}" if m < iterations else f"{where}: learned"
        )
    return Frames(learned.history.numpy()[chosen], tuple(captions))


def of_use(weights: Floats) -> Frames:
    """One frame: the weights that a rule gave, as a mean of the trials."""
    return Frames(weights[None], ("As used, mean of the trials",))

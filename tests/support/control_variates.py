"""SCAFFOLD and FedDyn in NumPy, written from their papers: a softmax regression without bias, in full batches."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class FullBatches:
    """Clients that make E_k steps of gradient descent a round on all of their samples.

    Args:
        clients: (x [n, d], y [n]) of each.
        classes: C.
        steps: τ_k.
        lr: η.
        forgets: (t, k) of clients that have lost their vector before a round.
    """

    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]],
        classes: int,
        steps: Sequence[int],
        lr: float,
        forgets: Collection[tuple[int, int]] = (),
    ) -> None:
        self.data = [(np.asarray(x, np.float64), np.eye(classes)[np.asarray(y)]) for x, y in clients]
        self.steps, self.lr, self.forgets = steps, lr, forgets

    def gradient(self, k: int, w: Floats) -> Floats:
        """Of client k's mean cross-entropy at w [C, d]."""
        x, y = self.data[k]
        scores = np.exp(x @ w.T)
        return np.asarray((scores / scores.sum(1, keepdims=True) - y).T @ x / len(x))

    def scaffold(self, w: Floats, took_part: Sequence[Sequence[bool]]) -> tuple[Floats, Floats, list[Floats]]:
        """w, c and all c_k after the rounds; Algorithm 1 of Karimireddy et al. with η_g = 1 and option II."""
        number = len(self.data)
        c, controls = np.zeros_like(w), [np.zeros_like(w) for _ in range(number)]
        for t, row in enumerate(took_part):
            chosen = [k for k in range(number) if row[k]]
            self._forget(controls, t)
            moves, changes = [], []
            for k in chosen:
                y = w.copy()
                for _ in range(self.steps[k]):
                    y -= self.lr * (self.gradient(k, y) - controls[k] + c)
                new = controls[k] - c + (w - y) / (self.steps[k] * self.lr)
                moves.append(y - w)
                changes.append(new - controls[k])
                controls[k] = new
            if chosen:
                w = w + np.mean(moves, axis=0)
                c = c + len(chosen) / number * np.mean(changes, axis=0)
        return w, c, controls

    def feddyn(
        self, w: Floats, took_part: Sequence[Sequence[bool]], alpha: float
    ) -> tuple[Floats, Floats, list[Floats]]:
        """w, h and all h_k after the rounds; Algorithm 1 of Acar et al., its local problem by gradient descent."""
        number = len(self.data)
        h, linear = np.zeros_like(w), [np.zeros_like(w) for _ in range(number)]
        for t, row in enumerate(took_part):
            chosen = [k for k in range(number) if row[k]]
            self._forget(linear, t)
            models = []
            for k in chosen:
                theta = w.copy()
                for _ in range(self.steps[k]):
                    theta -= self.lr * (self.gradient(k, theta) - linear[k] + alpha * (theta - w))
                linear[k] = linear[k] - alpha * (theta - w)
                models.append(theta)
            if chosen:
                h = h - alpha / number * sum(theta - w for theta in models)
                w = np.mean(models, axis=0) - h / alpha
        return w, h, linear

    def _forget(self, vectors: list[Floats], t: int) -> None:
        for k in range(len(vectors)):
            if (t, k) in self.forgets:
                vectors[k] = np.zeros_like(vectors[k])

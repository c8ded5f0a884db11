"""Where a weight-learning run stands, in memory and in a checkpoint, and the step that takes it further.

The step is Adam's on θ (Kingma and Ba 2015), with or without momentum, as a pure function with its state in the open:
torch's own optimiser loads the compiler on first use, which takes seconds that nothing here needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedunfold.io.checkpoint import Checkpoint, Tensors

EPSILON = 1e-8


def normalize_squares(theta: Tensor) -> Tensor:
    """Θ = θ²/Σθ² along the last axis."""
    squares = theta.square()
    return squares / squares.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Adam:
    """m ← β₁ m + (1−β₁) g,  v ← β₂ v + (1−β₂) g²,  θ ← θ − η (m/(1−β₁ⁿ)) / (√(v/(1−β₂ⁿ)) + ε) at step n.

    >>> theta, _ = Adam.start(torch.zeros(1)).step(torch.zeros(1), torch.ones(1), lr=0.5)
    >>> round(theta.item(), 6)
    -0.5
    """

    m: Tensor
    v: Tensor
    steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    @classmethod
    def start(cls, theta: Tensor, betas: tuple[float, float] = betas) -> "Adam":
        return cls(torch.zeros_like(theta), torch.zeros_like(theta), betas=betas)

    @property
    def slopes(self) -> Tensor:
        """√(v/(1−β₂ⁿ)), how large gradients were of late; one far below ε moves nothing."""
        return (self.v / (1 - self.betas[1] ** max(1, self.steps))).sqrt()

    def step(self, theta: Tensor, gradient: Tensor, lr: float | Tensor) -> tuple[Tensor, "Adam"]:
        """The next θ, and the state after it."""
        n, (beta1, beta2) = self.steps + 1, self.betas
        m = beta1 * self.m + (1 - beta1) * gradient
        v = beta2 * self.v + (1 - beta2) * gradient.square()
        unbiased_m, unbiased_v = m / (1 - beta1**n), v / (1 - beta2**n)
        return theta - lr * unbiased_m / (unbiased_v.sqrt() + EPSILON), replace(self, m=m, v=v, steps=n)


@dataclass(frozen=True)
class Progress:
    """What the next outer iteration needs, and what the ones before it brought.

    Attributes:
        roots: θ and, in the last column, σ (s = σ²), so that one optimiser serves both, [T, K+1].
        optimizer: Its state.
        losses: An entry for every iteration done.
        history: Θ before the first iteration and after each, [T, K].
        rejections: In how many rounds of all of them each client was rejected, [K].
    """

    roots: Tensor
    optimizer: Adam
    losses: tuple[float, ...] = ()
    history: tuple[Tensor, ...] = field(default=())
    rejections: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @classmethod
    def start(cls, shares: Tensor, step_sizes: Sequence[float], betas: tuple[float, float]) -> "Progress":
        """θ = √(N_k/N) and σ = √s_t in every round."""
        sigma = torch.tensor(step_sizes, dtype=shares.dtype).sqrt()
        roots = torch.cat([shares.sqrt().repeat(len(sigma), 1), sigma[:, None]], 1)
        nobody = torch.zeros(len(shares), dtype=torch.long)
        return cls(roots, Adam.start(roots, betas), (), (normalize_squares(roots[:, :-1]),), nobody)

    def after(self, loss: float, gradient: Tensor, lr: float | Tensor, rejected: Sequence[int] = ()) -> "Progress":
        """One Adam step further; `rejected` names clients as often as they were."""
        roots, optimizer = self.optimizer.step(self.roots, gradient, lr)
        history = (*self.history, normalize_squares(roots[:, :-1]))
        counts = torch.bincount(torch.tensor(rejected, dtype=torch.long), minlength=len(self.rejections))
        return Progress(roots, optimizer, (*self.losses, loss), history, self.rejections + counts)

    def save(self, checkpoint: Checkpoint) -> None:
        checkpoint.save(
            {
                "roots": self.roots,
                "m": self.optimizer.m,
                "v": self.optimizer.v,
                "losses": torch.tensor(self.losses, dtype=torch.float64),
                "history": torch.stack(self.history),
                "rejections": self.rejections,
            }
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, betas: tuple[float, float]) -> "Progress | None":
        """Read what `save` wrote for the same weight-learning run, where there is such a file."""

        def parse(tensors: Tensors, _: object) -> Progress:
            _check(**tensors)
            losses = tuple(tensors["losses"].tolist())
            optimizer = Adam(tensors["m"], tensors["v"], len(losses), betas)
            return cls(tensors["roots"], optimizer, losses, tuple(tensors["history"]), tensors["rejections"])

        return checkpoint.load(parse)


def _check(roots: Tensor, m: Tensor, v: Tensor, losses: Tensor, history: Tensor, rejections: Tensor) -> None:
    """ValueError where the tensors are not of one run: [T, K+1] thrice, [M], [M+1, T, K] and [K]."""
    rounds, columns = roots.shape
    shapes = [(rounds, columns), (rounds, columns), (len(losses),), (len(losses) + 1, rounds, columns - 1)]
    if [tuple(tensor.shape) for tensor in (m, v, losses, history)] != shapes or rejections.shape != (columns - 1,):
        raise ValueError("its tensors are of different sizes")
    if not all(tensor.is_floating_point() for tensor in (roots, m, v, losses, history)):
        raise ValueError("its tensors are no floating-point numbers")
    if rejections.dtype != torch.long:
        raise ValueError("its counts are no whole numbers")

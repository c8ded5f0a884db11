"""The outer loop: run the federation, differentiate, take an Adam step on θ, again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch

from fedunfold.errors import InputError
from fedunfold.federation import Federation
from fedunfold.losses import OuterLoss, OuterName
from fedunfold.rounds import Algorithm
from fedunfold.unfolding.adam import Adam
from fedunfold.unfolding.adjoint import AdjointKind, unfold, weights_of
from fedunfold.weighting.learned import LearnedWeights


@dataclass(frozen=True)
class Learning:
    """How weights are learned.

    `iterations` Adam steps of size `lr` on θ, from θ = √(N_k/N). The initial model is the same in every
    iteration (`fixed`, the paper's code) or drawn anew (`resample`, the paper's text).
    """

    iterations: int = 40
    lr: float = 0.02
    adjoint: AdjointKind = "first_order"
    outer: OuterName = "path"
    initial_model: Literal["fixed", "resample"] = "fixed"

    def __post_init__(self) -> None:
        OuterLoss(self.outer)
        if self.iterations < 1:
            raise InputError(f"learning needs at least 1 iteration, not {self.iterations}.")
        if not 0 < self.lr < 1:
            raise InputError(f"the outer learning rate must lie between 0 and 1, not {self.lr}.")
        if self.adjoint not in get_args(AdjointKind):
            raise InputError(f"the adjoint is 'first_order' or 'exact', not '{self.adjoint}'.")
        if self.initial_model not in ("fixed", "resample"):
            raise InputError(f"the initial model is 'fixed' or 'resample', not '{self.initial_model}'.")


FAST = (Learning.iterations, Learning.lr)
"""Outer iterations and step size of the fast schedule; the published one of an environment is in its `paper`."""


def check_learnable(algorithm: Algorithm) -> None:
    """Refuse what the adjoint does not reach through."""
    if algorithm.update.momentum:
        raise InputError(
            f"weights cannot be learned through the local update '{algorithm.update.name}', whose steps depend on "
            "earlier gradients; learn with sgd, prox or nova, and run momentum with the result."
        )


def learn(
    federation: Federation,
    rounds: int,
    *,
    algorithm: Algorithm | None = None,
    learning: Learning | None = None,
    digest: str = "",
    on_iteration: Callable[[LearnedWeights], None] | None = None,
) -> LearnedWeights:
    """Learn Θ[T, K] for a federation; `on_iteration` gets what is learned so far after every step."""
    algorithm, learning = algorithm or Algorithm(), learning or Learning()
    if rounds < 1:
        raise InputError(f"learning weights needs at least 1 round, not {rounds}.")
    check_learnable(algorithm)
    sizes = torch.tensor([client.samples for client in federation.clients], dtype=torch.float64)
    theta = (sizes / sizes.sum()).sqrt().repeat(rounds, 1)
    optimizer = Adam.start(theta)
    outer = OuterLoss(learning.outer)
    losses: list[float] = []
    history = torch.empty(learning.iterations + 1, *theta.shape, dtype=torch.float64)
    history[0] = weights_of(theta)

    def so_far() -> LearnedWeights:
        return LearnedWeights(
            keys=tuple(client.key for client in federation.clients),
            weights=history[len(losses)].clone(),
            losses=torch.tensor(losses, dtype=torch.float64),
            history=history[: len(losses) + 1],
            settings={"algorithm": asdict(algorithm), "learning": asdict(learning), "rounds": rounds},
            digest=digest,
        )

    for m in range(learning.iterations):
        run = f"learn-{m}"
        start = federation.initial_model(run if learning.initial_model == "resample" else "learn-0")
        step = unfold(federation, theta, algorithm, outer, learning.adjoint, run=run, model=start)
        theta, optimizer = optimizer.step(theta, step.gradient, learning.lr)
        losses.append(step.loss)
        history[m + 1] = weights_of(theta)
        if on_iteration is not None:
            on_iteration(so_far())
    return so_far()

"""The outer loop: run the federation, differentiate, take a step on θ, again."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedunfold.aggregation.screening import RejectedUpdate
from fedunfold.core.errors import InputError
from fedunfold.core.federation import Federation, max_parallel_runs
from fedunfold.core.settings import is_count
from fedunfold.core.task import OuterLoss, OuterName
from fedunfold.core.threading import threads_for
from fedunfold.core.warnings import of_learning
from fedunfold.io.checkpoint import Checkpoint
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.loop import Algorithm, check_algorithm
from fedunfold.training.state import fingerprint
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.optimizer import EPSILON
from fedunfold.unfolding.state import Progress
from fedunfold.unfolding.update_store import UpdateStorage
from fedunfold.version import VERSION

log = logging.getLogger(__name__)
BETAS = {"adam": (0.9, 0.999), "rmsprop": (0.0, 0.9)}


@dataclass(frozen=True)
class Learning:
    """How weights are learned.

    `iterations` steps of size `lr` on θ, from θ = √(N_k/N). `optimizer` is "adam", the paper's, or "rmsprop", Adam
    without momentum and with a short memory: few large steps must not carry on where the gradient has turned. With
    `decay` "linear", step m is lr (1 − m/M): large steps find the way, small ones at the end let the noise of single
    draws average out. No step of a client's θ is larger than half its first value. The initial model is the same in
    every iteration (`fixed`, the paper's code) or drawn anew (`resample`, the paper's text). Every step averages the
    gradients of `draws` runs, each with its own minibatches and absences.

    `pull` ρ holds the weights near the sizes p_k = N_k/N: the loss gets ρ L₀ (1/T) Σ_t KL(p ‖ Θ^(t)), with L₀
    the outer loss of the first step. With `step_sizes` "learned", s_t = σ_t² of every round (`Algorithm`) is
    learned beside Θ, from those of the algorithm. `shared_rounds` rounds in a row have the same weights and step
    size: fewer numbers to learn, and less noise in each. `tape` is where the updates of all rounds are kept: "full",
    or with large models and many clients "half" (of the memory) or on "disk".

    >>> Learning(iterations=4, lr=0.1).step(2)
    0.05
    """

    iterations: int = 15
    lr: float = 0.1
    adjoint: AdjointKind = "first_order"
    outer: OuterName = "path"
    initial_model: Literal["fixed", "resample"] = "fixed"
    draws: int = 1
    pull: float = 0.0
    step_sizes: Literal["one", "learned"] = "one"
    shared_rounds: int = 1
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    decay: Literal["none", "linear"] = "linear"
    tape: UpdateStorage = "full"

    def __post_init__(self) -> None:
        OuterLoss(self.outer)
        if not is_count(self.iterations):
            raise InputError(f"learning needs at least 1 iteration, not {self.iterations!r}.")
        if not (isinstance(self.lr, int | float) and 0 < self.lr < 1):
            raise InputError(f"the outer learning rate must lie between 0 and 1, not {self.lr!r}.")
        if self.adjoint not in get_args(AdjointKind):
            raise InputError(f"the adjoint is 'first_order' or 'exact', not '{self.adjoint}'.")
        if self.initial_model not in ("fixed", "resample"):
            raise InputError(f"the initial model is 'fixed' or 'resample', not '{self.initial_model}'.")
        if not is_count(self.draws):
            raise InputError(f"a step of the learning needs at least 1 draw, not {self.draws!r}.")
        if not is_count(self.shared_rounds):
            raise InputError(f"weights are shared by at least 1 round, not {self.shared_rounds!r}.")
        if not (isinstance(self.pull, int | float) and 0 <= self.pull < math.inf):
            raise InputError(f"the pull towards the sizes must be a finite number >= 0, not {self.pull!r}.")
        if self.optimizer not in BETAS:
            raise InputError(f"the outer optimizer is 'adam' or 'rmsprop', not '{self.optimizer}'.")
        if self.decay not in ("none", "linear"):
            raise InputError(f"the outer step size has decay 'none' or 'linear', not '{self.decay}'.")
        if self.tape not in get_args(UpdateStorage):
            raise InputError(f"the tape of updates is 'full', 'half' or on 'disk', not '{self.tape}'.")
        if self.step_sizes not in ("one", "learned"):
            raise InputError(f"the step sizes are 'one' or 'learned', not '{self.step_sizes}'.")

    def step(self, m: int) -> float:
        """The step size in iteration m."""
        return self.lr * (1 - m / self.iterations) if self.decay == "linear" else self.lr


FAST: Mapping[str, Any] = {name: getattr(Learning, name) for name in ("iterations", "lr", "optimizer", "decay")}
"""The fast schedule: outer iterations, step size, and how steps are made from gradients."""


def published(iterations: int, lr: float) -> Mapping[str, Any]:
    """The paper's schedule, with its numbers for an environment."""
    return {"iterations": iterations, "lr": lr, "optimizer": "adam", "decay": "none"}


def check_learning(given: object) -> None:
    """Refuse what only looks like a way to learn, such as a schedule's name."""
    if not isinstance(given, Learning):
        raise InputError(f"learning is a Learning, such as Learning(iterations=25), not {given!r}.")


def check_learnable(algorithm: Algorithm) -> None:
    """Refuse what is no algorithm, and what the adjoint does not reach through."""
    check_algorithm(algorithm)
    if algorithm.update.momentum:
        raise InputError(
            f"weights cannot be learned through the local update '{algorithm.update.name}', whose steps depend on "
            "earlier gradients; learn with sgd, prox or nova, and run momentum with the result."
        )
    if algorithm.aggregate.name != "mean":
        raise InputError(
            f"weights cannot be learned through the aggregation '{algorithm.aggregate.name}', which is no weighted "
            "sum; learn with the mean, and run the result with --aggregate."
        )


def learn(
    federation: Federation,
    rounds: int,
    *,
    algorithm: Algorithm | None = None,
    learning: Learning | None = None,
    digest: str = "",
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = None,
    on_iteration: Callable[[LearnedWeights], bool | None] | None = None,
) -> LearnedWeights:
    """Learn Θ[T, K] for a federation; `on_iteration` gets what is learned so far after every step.

    With a `checkpoint`, where the learning stands is written to that file after a step, at most every
    `checkpoint_seconds` (5 by default; 0: after every step), after the last one and at Ctrl-C. A file already there is
    gone on from, of which `on_iteration` hears first: the result is the same as without the interruption.
    """
    algorithm, learning = algorithm or Algorithm(), learning or Learning()
    check_learning(learning)
    if rounds < 1:
        raise InputError(f"learning weights needs at least 1 round, not {rounds}.")
    check_learnable(algorithm)
    sizes = torch.tensor([client.samples for client in federation.clients], dtype=torch.float64)
    shares = sizes / sizes.sum()
    keys = tuple(client.key for client in federation.clients)
    settings = {"algorithm": asdict(algorithm), "learning": asdict(learning), "rounds": rounds}
    betas = BETAS[learning.optimizer]
    # A first step is as large as `lr` whatever the gradient, and must not take a small client's weight away for good.
    most = torch.cat([shares.sqrt() / 2, shares.new_full((1,), math.inf)])
    progress = Progress.start(shares, [algorithm.step_size(t) for t in range(rounds)], betas)
    # The first initial model stands for the seed, the model and the precision.
    start = federation.initial_model("learn-0")
    identity = settings | {
        "keys": keys,
        "sizes": sizes.tolist(),
        "digest": digest,
        "version": VERSION,
        "device": start.device.type,
        "start": fingerprint(start),
    }
    kept = None if checkpoint is None else Checkpoint(checkpoint, "learning", identity, checkpoint_seconds)
    saved = 0
    if kept is not None and (found := Progress.load(kept, betas)) is not None:
        progress, saved = found, len(found.losses)

    @threads_for(0)
    def so_far() -> LearnedWeights:
        used = asdict(_with_steps(algorithm, learning, progress.roots))
        return LearnedWeights(
            keys=keys,
            weights=progress.history[-1].clone(),
            losses=torch.tensor(progress.losses, dtype=torch.float64),
            history=torch.stack(progress.history),
            settings=settings | {"algorithm": used},
            digest=digest,
            warnings=of_learning(
                keys,
                progress.history[-1],
                progress.optimizer.slopes[:, :-1],
                EPSILON,
                progress.rejected,
                rounds * learning.draws * len(progress.losses),
            ),
        )

    def keep(*, at_once: bool = False) -> None:
        nonlocal saved
        if kept is not None and len(progress.losses) > saved and (at_once or kept.due):
            progress.save(kept)
            saved = len(progress.losses)

    if 0 < saved < learning.iterations:
        log.info("going on from outer iteration %d of %d, kept in %s", saved, learning.iterations, checkpoint)
    if saved and on_iteration is not None:
        on_iteration(so_far())
    try:
        for m in range(saved, learning.iterations):
            loss, gradient, rejected = _step(
                federation, progress.roots, _with_steps(algorithm, learning, progress.roots), learning, m, start
            )
            first = progress.losses[0] if progress.losses else loss
            gradient[:, :-1] += _pull(progress.roots[:, :-1], shares, learning.pull * abs(first))
            after = progress.after(loss, _shared(gradient, learning.shared_rounds), most.clamp(max=learning.step(m)))
            # In one step: Ctrl-C must not find an iteration without its counts.
            progress = after.with_set_aside([keys.index(entry.client) for entry in rejected])
            keep()
            if on_iteration is not None:
                on_iteration(so_far())
    except KeyboardInterrupt:
        keep(at_once=True)
        raise
    keep(at_once=True)
    return so_far()


def _step(
    federation: Federation, roots: Tensor, algorithm: Algorithm, learning: Learning, m: int, first: Tensor
) -> tuple[float, Tensor, list[RejectedUpdate]]:
    """The outer loss of iteration m and its gradient in (θ, σ), averaged over the draws, and who was set aside; `first`
    is the initial model of the first run."""
    theta, root = roots[:, :-1], roots[:, -1]
    rejected: list[RejectedUpdate] = []
    loss, gradient = 0.0, torch.zeros_like(roots)
    runs = [f"learn-{m}" if draw == 0 else f"learn-{m}-{draw}" for draw in range(learning.draws)]
    at_once, resampled = max_parallel_runs(federation), learning.initial_model == "resample"
    for begin in range(0, learning.draws, at_once):
        together = runs[begin : begin + at_once]
        for found in unroll_and_grad(
            *(federation, theta, algorithm, OuterLoss(learning.outer), learning.adjoint),
            runs=together,
            models=[federation.initial_model(run) if resampled else first for run in together],
            tape=learning.tape,
        ):
            rejected += found.rejected
            loss += found.loss / learning.draws
            gradient[:, :-1] += found.gradient / learning.draws
            if learning.step_sizes == "learned":
                gradient[:, -1] += 2 * root * found.step_gradient / learning.draws
    return loss, gradient, rejected


def _with_steps(algorithm: Algorithm, learning: Learning, roots: Tensor) -> Algorithm:
    """The algorithm with s = σ², where step sizes are learned."""
    if learning.step_sizes == "one":
        return algorithm
    return replace(algorithm, step_sizes=tuple(roots[:, -1].square().tolist()))


def _pull(theta: Tensor, shares: Tensor, strength: float) -> Tensor:
    """Gradient in θ of strength · (1/T) Σ_t KL(p ‖ Θ^(t)): −2 p_k/θ_k + 2 θ_k/Σ_l θ_l², over T."""
    if strength == 0:
        return torch.zeros_like(theta)
    return 2 * strength / len(theta) * (theta / theta.square().sum(1, keepdim=True) - shares / theta)


def _shared(gradient: Tensor, rounds: int) -> Tensor:
    """The mean over every `rounds` rounds in a row, which keeps their equal weights equal."""
    return torch.cat([block.mean(0, keepdim=True).expand_as(block) for block in torch.split(gradient, rounds)])

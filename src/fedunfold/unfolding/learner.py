"""The outer loop: run the federation, differentiate, take a step on θ, again."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm, check_algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.federation import Federation
from fedunfold.core.outcomes import RejectedUpdate
from fedunfold.core.params import fingerprint
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.run_names import fresh_run
from fedunfold.core.settings import is_count
from fedunfold.core.threading import threads_for
from fedunfold.core.warnings import of_learning
from fedunfold.io.checkpoint import Checkpoint
from fedunfold.rules.learned import LearnedWeights
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.state import EPSILON, Progress
from fedunfold.unfolding.update_store import UpdateStorage
from fedunfold.version import VERSION

log = logging.getLogger(__name__)
BETAS = {"adam": (0.9, 0.999), "rmsprop": (0.0, 0.9)}
CHOICES = {
    "adjoint": get_args(AdjointKind),
    "initial_model": ("fixed", "resample"),
    "step_sizes": ("fixed", "learned"),
    "optimizer": tuple(BETAS),
    "decay": ("none", "linear"),
    "update_storage": get_args(UpdateStorage),
}


@dataclass(frozen=True)
class Learning:
    """How weights are learned.

    Attributes:
        iterations: M, how many steps are made on θ, from θ = √(N_k/N).
        lr: Their size. No step of a client's θ is larger than half its first value.
        adjoint: "first_order", the paper's code, or "exact" (`adjoint`).
        outer: The outer loss's name (`outer_loss`).
        initial_model: The same in every iteration ("fixed", the paper's code) or drawn anew ("resample", its text).
        num_samples: Every step averages the gradients of so many runs, each with its own minibatches and absences.
        kl_weight: ρ keeps the weights near the sizes p_k = N_k/N: the loss gets ρ L₀ (1/T) Σ_t KL(p ‖ Θ^(t)), with L₀
            the outer loss of the first step.
        step_sizes: "fixed", or "learned": s_t = σ_t² of every round (`Algorithm`) is learned beside Θ.
        tie_rounds: So many rounds in a row have the same weights and step size: fewer numbers to learn, and less noise
            in each.
        optimizer: "adam", the paper's, or "rmsprop", Adam without momentum and with a short memory: few large steps
            must not carry on where the gradient has turned.
        decay: With "linear", step m is lr (1 − m/M): large steps find the way, small ones at the end let the noise of
            single runs average out.
        update_storage: Where the updates of all rounds are stored: "full", or with large models and many clients
            "half" (of the memory) or on "disk".

    >>> Learning(iterations=4, lr=0.1).step(2)
    0.05
    """

    iterations: int = 15
    lr: float = 0.1
    adjoint: AdjointKind = "first_order"
    outer: str = "path"
    initial_model: Literal["fixed", "resample"] = "fixed"
    num_samples: int = 1
    kl_weight: float = 0.0
    step_sizes: Literal["fixed", "learned"] = "fixed"
    tie_rounds: int = 1
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    decay: Literal["none", "linear"] = "linear"
    update_storage: UpdateStorage = "full"

    def __post_init__(self) -> None:
        OUTER_LOSSES.make(self.outer)
        for name in ("iterations", "num_samples", "tie_rounds"):
            if not is_count(value := getattr(self, name)):
                raise InputError(f"{name} of a learning must be a whole number of at least 1, not {value!r}.")
        if not (isinstance(self.lr, int | float) and 0 < self.lr < 1):
            raise InputError(f"the outer learning rate must lie between 0 and 1, not {self.lr!r}.")
        if not (isinstance(self.kl_weight, int | float) and 0 <= self.kl_weight < math.inf):
            raise InputError(f"kl_weight must be a finite number >= 0, not {self.kl_weight!r}.")
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"{name} of a learning is one of {', '.join(choices)}, not '{value}'.")

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
    if not algorithm.aggregator.is_linear:
        raise InputError(
            f"weights cannot be learned through the aggregator '{algorithm.aggregator.name}', which is no weighted "
            "sum; learn with the mean, and run the result with that aggregator."
        )
    if algorithm.schedule != "synchronous":
        raise InputError(
            "weights cannot be learned through asynchronous rounds; learn them in synchronous ones, or take a rule "
            "that reads the staleness, such as fedbuff or a pre-trained one."
        )
    if algorithm.own_layers != "none":
        raise InputError(
            "weights cannot be learned where layers stay with the clients, which the adjoint does not reach; learn "
            "them with own_layers='none', or run another weighting rule."
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
    """Learn Θ[T, K] for a federation.

    With a `checkpoint`, where it stands is saved to that file, and a file that exists is resumed from: the result is
    the same as without the interruption. Under secure aggregation it is not, for there every outer step has runs of
    fresh names.

    Args:
        federation: Who trains.
        rounds: T.
        algorithm: How clients and server train.
        learning: How weights are learned.
        digest: Stands for the federation, so that weights can tell what they were learned for.
        checkpoint: The file.
        checkpoint_seconds: It is saved at most that often (5 by default; 0: after every step), and after the last step
            and at Ctrl-C.
        on_iteration: Called with what is learned so far after every step, first with what was resumed from; where it
            returns True, learning stops early.

    Returns:
        The learned weights.
    """
    algorithm, learning = algorithm or Algorithm(), learning or Learning()
    check_learning(learning)
    if rounds < 1:
        raise InputError(f"learning weights needs at least 1 round, not {rounds}.")
    check_learnable(algorithm)
    if federation.sums_only and learning.initial_model == "fixed":
        raise InputError(
            "secure sums from the same initial model in every outer step would reveal single updates; learn with "
            "initial_model='resample'."
        )
    sizes = torch.tensor([client.num_examples for client in federation.clients], dtype=torch.float64)
    shares = sizes / sizes.sum()
    client_ids = tuple(client.client_id for client in federation.clients)
    settings = {"algorithm": algorithm.describe(), "learning": asdict(learning), "rounds": rounds}
    betas = BETAS[learning.optimizer]
    # A first step is as large as `lr` whatever the gradient, and must not take a small client's weight away for good.
    most = torch.cat([shares.sqrt() / 2, shares.new_full((1,), math.inf)])
    progress = Progress.start(shares, [algorithm.step_size(t) for t in range(rounds)], betas)
    # The first initial model stands for the seed, the model and the precision.
    start = federation.initial_model("learn-0")
    identity = settings | {
        "client_ids": client_ids,
        "sizes": sizes.tolist(),
        "digest": digest,
        "version": VERSION,
        "device": start.device.type,
        "start": fingerprint(start),
    }
    store = None if checkpoint is None else Checkpoint(checkpoint, "learning", identity, checkpoint_seconds)
    saved = 0
    if store is not None and (found := Progress.load(store, betas)) is not None:
        progress, saved = found, len(found.losses)

    @threads_for(0)
    def so_far() -> LearnedWeights:
        used = _with_steps(algorithm, learning, progress.roots).describe()
        return LearnedWeights(
            client_ids=client_ids,
            weights=progress.history[-1].clone(),
            losses=torch.tensor(progress.losses, dtype=torch.float64),
            history=torch.stack(progress.history),
            settings=settings | {"algorithm": used},
            digest=digest,
            warnings=of_learning(
                client_ids,
                progress.history[-1],
                progress.optimizer.slopes[:, :-1],
                EPSILON,
                progress.rejections,
                rounds * learning.num_samples * len(progress.losses),
            ),
        )

    def save(*, at_once: bool = False) -> None:
        nonlocal saved
        if store is not None and len(progress.losses) > saved and (at_once or store.should_save):
            progress.save(store)
            saved = len(progress.losses)

    if 0 < saved < learning.iterations:
        log.info("resuming from outer iteration %d of %d, saved in %s", saved, learning.iterations, checkpoint)
    stopped = bool(saved) and on_iteration is not None and on_iteration(so_far())
    try:
        for m in range(learning.iterations if stopped else saved, learning.iterations):
            loss, gradient, rejected = _step(
                federation, progress.roots, _with_steps(algorithm, learning, progress.roots), learning, m, start
            )
            first = progress.losses[0] if progress.losses else loss
            gradient[:, :-1] += _kl_gradient(progress.roots[:, :-1], shares, learning.kl_weight * abs(first))
            gradient, lr = _tied(gradient, learning.tie_rounds), most.clamp(max=learning.step(m))
            # In one step: Ctrl-C must not find an iteration without its counts.
            progress = progress.after(loss, gradient, lr, [client_ids.index(entry.client) for entry in rejected])
            save()
            if on_iteration is not None and on_iteration(so_far()):
                break
    except KeyboardInterrupt:
        save(at_once=True)
        raise
    save(at_once=True)
    return so_far()


def _step(
    federation: Federation, roots: Tensor, algorithm: Algorithm, learning: Learning, m: int, first: Tensor
) -> tuple[float, Tensor, list[RejectedUpdate]]:
    """The outer loss of iteration m and its gradient in (θ, σ), averaged over the samples, and who was rejected;
    `first` is the initial model of the first run."""
    theta, root, samples = roots[:, :-1], roots[:, -1], learning.num_samples
    rejected: list[RejectedUpdate] = []
    loss, gradient = 0.0, torch.zeros_like(roots)
    runs = [f"learn-{m}" if sample == 0 else f"learn-{m}-{sample}" for sample in range(samples)]
    if federation.sums_only:  # also of a step that is repeated after an interruption
        runs = [fresh_run(run) for run in runs]
    at_once, resamples = federation.max_parallel_runs, learning.initial_model == "resample"
    for begin in range(0, samples, at_once):
        together = runs[begin : begin + at_once]
        for found in unroll_and_grad(
            *(federation, theta, algorithm, OUTER_LOSSES.make(learning.outer), learning.adjoint),
            runs=together,
            models=[federation.initial_model(run) if resamples else first for run in together],
            storage=learning.update_storage,
        ):
            rejected += found.rejected
            loss += found.loss / samples
            gradient[:, :-1] += found.gradient / samples
            if learning.step_sizes == "learned":
                gradient[:, -1] += 2 * root * found.step_gradient / samples
    return loss, gradient, rejected


def _with_steps(algorithm: Algorithm, learning: Learning, roots: Tensor) -> Algorithm:
    """The algorithm with s = σ², where step sizes are learned."""
    if learning.step_sizes == "fixed":
        return algorithm
    return replace(algorithm, step_sizes=tuple(roots[:, -1].square().tolist()))


def _kl_gradient(theta: Tensor, shares: Tensor, strength: float) -> Tensor:
    """Gradient in θ of strength · (1/T) Σ_t KL(p ‖ Θ^(t)): −2 p_k/θ_k + 2 θ_k/Σ_l θ_l², over T."""
    if strength == 0:
        return torch.zeros_like(theta)
    return 2 * strength / len(theta) * (theta / theta.square().sum(1, keepdim=True) - shares / theta)


def _tied(gradient: Tensor, rounds: int) -> Tensor:
    """The mean over every `rounds` rounds in a row, which keeps their equal weights equal."""
    return torch.cat([block.mean(0, keepdim=True).expand_as(block) for block in torch.split(gradient, rounds)])

"""Learning φ over drawn federations: Adam on the mean of their gradients, each clipped, and those counted more in which
the rule does harm.

    g = (1/B) Σ_i c_i clip(∇_φ log(0.1 + L_i)),   c_i = caution where L_i is above FedAvg's loss, else 1
    clip(g) = g · min(1, clip/‖g‖)
    φ̄_m = φ̄_{m−1} + (φ_m − φ̄_{m−1})/min(m, M/10)   after m of M steps: about the mean of the last tenth

L_i is Σ_t r_t F(w^(t)) / (T F(w^(0))), r_t ∝ t^lateness, F the mean loss of held-out rows (`tempered_loss`), where what
is lost against FedAvg in a round counts `caution` times too (`federations`); its logarithm lets every federation count
the same. What is returned is the φ̄ that did best on federations drawn apart, by its mean gain over FedAvg plus that of
the worst tenth, at the end and over all rounds: a rule that others are to use without a second thought must do no harm.
A mean of many φ, because single ones swing between steps that are too long and too short.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedunfold.core.errors import FedunfoldError
from fedunfold.core.parts import SERVER_OPTIMIZERS, ServerOptimizer
from fedunfold.core.processes import worker_pool
from fedunfold.core.settings import Count, Natural, Positive, Settings
from fedunfold.core.threading import threads_for
from fedunfold.io.checkpoint import Checkpoint, Tensors
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.federations import Gain, meta_gradient, validate
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.parametric import ParametricRule, flattened, unflattened
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.unfolding.state import Adam
from fedunfold.version import VERSION

MARGIN = 0.25
"""A feature may lie outside the range it had on federations drawn apart by this part of it."""
ROUNDING = 1e-5
"""Losses that differ by less, relatively, are those of the same run."""
GAINS = ("mean gain", "worst tenth", "all rounds", "worst tenth")
"""How the columns of a validation are headed."""


class Pretraining(Settings):
    """How a rule is learned.

    Attributes:
        name: What the rule is called, with its version.
        family: A network, one for secure sums, which is best learned with `remembered` 0 in the distribution, or a
            formula.
        steps: How often φ is updated.
        federations: B, how many federations each of these updates sees; every one is drawn once.
        lr: The learning rate at first; from a fifth of the steps on it falls linearly to 0.
        clip: No federation's gradient is longer.
        lateness: How much more later rounds count: round t by t^lateness.
        caution: How much more those federations count, and those rounds, in which the rule is worse than FedAvg.
        width: Of the rule's layers; as many at least as it has decisions for a round.
        seed: Draws φ.
        adjoint: exact, or first_order.
        server: The server optimiser that the rule is for, described as `name:key=value,…`.
        validation: How many federations drawn apart φ is validated on.
        every: It is validated after so many steps, and after the last.
        patience: After so many validations without a better φ learning stops.
        distribution: What federations are drawn from.
    """

    name: str = Field(default="own@1", pattern=r"^[A-Za-z0-9][A-Za-z0-9@._-]{0,63}$")
    family: Family = "network"
    steps: Count = 250
    federations: Count = 30
    lr: Positive = 0.01
    clip: Positive = 0.3
    lateness: float = Field(default=0.5, ge=0, le=10)
    caution: float = Field(default=4.0, ge=1)
    width: int = Field(default=64, ge=3)
    seed: Natural = 0
    adjoint: AdjointKind = "exact"
    server: str = "grafted"
    validation: Count = 192
    every: Count = 50
    patience: Count = 5
    distribution: Distribution = Distribution()


@dataclass(frozen=True)
class Validation:
    """φ on the federations drawn apart, in percentage points above FedAvg.

    Attributes:
        step: After how many steps.
        mean: Mean gain of the last rounds.
        worst: Mean gain of the worst tenth of the federations.
        path: Mean gain over all rounds.
        worst_path: That of the tenth of the federations with the least.
        wins: Part of the federations with a gain; one within 0.25 points counts half.
        federations: How many there were in which FedAvg did not diverge.
    """

    step: int
    mean: float
    worst: float
    path: float
    worst_path: float
    wins: float
    federations: int

    @classmethod
    def of(cls, step: int, gains: list[Gain]) -> "Validation":
        final, path = np.sort([gain.final for gain in gains]), np.sort([gain.mean for gain in gains])
        wins = np.where(np.abs(final) <= 0.25, 0.5, final > 0)
        tenth = slice(max(1, len(final) // 10))
        worst, worst_path = float(final[tenth].mean()), float(path[tenth].mean())
        return cls(step, float(final.mean()), worst, float(path.mean()), worst_path, float(wins.mean()), len(final))

    @property
    def gains(self) -> tuple[float, ...]:
        """What there is under `GAINS`."""
        return self.mean, self.worst, self.path, self.worst_path

    @property
    def value(self) -> float:
        """What φ is chosen by."""
        return self.mean + self.worst + self.worst_path


@dataclass(frozen=True)
class Progress:
    """Where learning stands.

    Attributes:
        params: φ by name.
        average: φ̄, which is validated.
        optimizer: Adam's state, over all of φ.
        losses: The mean loss of every step's federations, as part of FedAvg's.
        validations: Those made.
        best: φ̄ with the largest value.
        ranges: Of the features it met there, [2, F+G].
        family: Of the rule.
    """

    params: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: Adam
    losses: tuple[float, ...] = ()
    validations: tuple[Validation, ...] = ()
    best: Mapping[str, Tensor] | None = None
    ranges: Tensor | None = None
    family: Family = "network"

    @property
    def chosen(self) -> Validation:
        """The best validation."""
        return max(self.validations, key=lambda made: made.value)

    @property
    def rule(self) -> ParametricRule:
        """The rule with the best φ."""
        if self.best is None or self.ranges is None:
            raise FedunfoldError("no φ was validated yet; let it learn for longer.")
        widened = MARGIN * (self.ranges[1] - self.ranges[0])
        ranges = torch.stack([self.ranges[0] - widened, self.ranges[1] + widened])
        return FAMILIES[self.family](self.best, ranges=ranges)


OnStep = Callable[[Progress], None]
Map = Callable[..., Iterable[Any]]
"""As Python's own `map`: of a function over the numbers of federations."""


def pretrain(
    settings: Pretraining,
    *,
    processes: int = 1,
    checkpoint: Path | None = None,
    on_step: OnStep = lambda progress: None,
) -> Progress:
    """Learn a rule; how many processes work makes no difference to what is learned.

    Args:
        settings: How.
        processes: How many federations are run at a time, with one thread each; one is run in this process.
        checkpoint: Where it is saved how far learning came; a file that exists is resumed from.
        on_step: Called after every step.

    Returns:
        Where it ended.

    Raises:
        FedunfoldError: A process was killed.
    """
    progress, store = _start(settings), None
    if checkpoint is not None:
        store = Checkpoint(checkpoint, "pre-training", settings.model_dump(mode="json") | {"version": VERSION})
        progress = store.load(partial(_parsed, settings.family)) or progress
    try:
        with _mapping(processes) as each:
            while not _finished(progress, settings):
                if not _due(progress, settings):
                    progress = _step(progress, settings, each)
                if _due(progress, settings):  # also where it was interrupted before it was validated
                    progress = _validated(progress, settings, each)
                if store is not None and store.should_save:
                    _save(store, progress)
                on_step(progress)
    except BrokenProcessPool as error:
        raise FedunfoldError("a process was killed (out of memory?); run the same again to resume.") from error
    finally:
        if store is not None:
            _save(store, progress)
    return progress


def _server(settings: Pretraining) -> ServerOptimizer:
    return SERVER_OPTIMIZERS.parse(settings.server)


def _start(settings: Pretraining) -> Progress:
    params = FAMILIES[settings.family].initial(settings.width, settings.seed).params
    return Progress(params, params, Adam.start(flattened(params), (0.9, 0.99)), family=settings.family)


def _finished(progress: Progress, settings: Pretraining) -> bool:
    made = progress.validations
    best = made.index(progress.chosen) if made else 0
    done = len(progress.losses) >= settings.steps and not _due(progress, settings)
    return done or len(made) - 1 - best >= settings.patience


def _due(progress: Progress, settings: Pretraining) -> bool:
    """Whether φ is to be validated before it is changed again."""
    step, made = len(progress.losses), progress.validations
    if not step or (made and made[-1].step == step):
        return False
    return step % settings.every == 0 or step == settings.steps


def _step(progress: Progress, settings: Pretraining, each: Map) -> Progress:
    done, count = len(progress.losses), settings.federations
    one = partial(
        meta_gradient,
        settings.distribution,
        params=progress.params,
        adjoint=settings.adjoint,
        server=_server(settings),
        family=settings.family,
        lateness=settings.lateness,
        caution=settings.caution,
    )
    found = [made for made in each(one, range(done * count, (done + 1) * count)) if made.gradient is not None]
    total = torch.zeros_like(progress.optimizer.m)
    for made in found:
        gradient = flattened(made.gradient or {})
        harm = settings.caution if made.loss > (1 + ROUNDING) * made.fedavg_loss else 1.0
        total += harm * gradient * min(1.0, settings.clip / max(float(gradient.norm()), 1e-12)) / count
    lr = settings.lr * min(1.0, 1.25 * (1 - done / settings.steps))
    theta, optimizer = progress.optimizer.step(flattened(progress.params), total, lr)
    ratio = float(np.mean([made.loss / made.fedavg_loss for made in found])) if found else 1.0
    params, part = unflattened(theta, progress.params), 1 / min(done + 1, max(1, settings.steps // 10))
    average = {name: mean + part * (params[name] - mean) for name, mean in progress.average.items()}
    return replace(progress, params=params, average=average, optimizer=optimizer, losses=(*progress.losses, ratio))


def _validated(progress: Progress, settings: Pretraining, each: Map) -> Progress:
    common = partial(validate, settings.distribution, params=progress.average)
    one = partial(common, server=_server(settings), family=settings.family)
    gains = [gain for gain in each(one, range(settings.validation)) if gain is not None]
    if not gains:
        raise FedunfoldError(
            "FedAvg diverges in every federation drawn for validation; lower the distribution's `step`."
        )
    made = Validation.of(len(progress.losses), gains)
    better = not progress.validations or made.value > progress.chosen.value
    progress = replace(progress, validations=(*progress.validations, made))
    found = [gain.ranges for gain in gains if gain.ranges is not None]
    if not better or not found:
        return progress
    met = torch.stack(found)
    ranges = torch.stack([met[:, 0].amin(0), met[:, 1].amax(0)])
    return replace(progress, best=progress.average, ranges=ranges)


@contextmanager
def _mapping(processes: int) -> Iterator[Map]:
    if processes == 1:
        with threads_for(0):
            yield map
        return
    with worker_pool(processes) as pool:
        yield pool.map


def _save(store: Checkpoint, progress: Progress) -> None:
    tensors = {f"params.{name}": value for name, value in progress.params.items()}
    tensors |= {f"average.{name}": value for name, value in progress.average.items()}
    tensors |= {"adam.m": progress.optimizer.m, "adam.v": progress.optimizer.v}
    if progress.best is not None and progress.ranges is not None:
        tensors |= {f"best.{name}": value for name, value in progress.best.items()} | {"ranges": progress.ranges}
    made = [vars(validation) for validation in progress.validations]
    names = list(progress.params)
    tensors = {name: value.clone() for name, value in tensors.items()}  # φ and the best one may be the same memory
    store.save(tensors, {"losses": list(progress.losses), "validations": made, "names": names})


def _parsed(family: Family, tensors: Tensors, about: Any) -> Progress:
    losses, names = tuple(map(float, about["losses"])), about["names"]
    tensors = {name: value.clone() for name, value in tensors.items()}
    best = {name: tensors[f"best.{name}"] for name in names} if "ranges" in tensors else None
    return Progress(
        {name: tensors[f"params.{name}"] for name in names},
        {name: tensors[f"average.{name}"] for name in names},
        Adam(tensors["adam.m"], tensors["adam.v"], len(losses), (0.9, 0.99)),
        losses,
        tuple(Validation(**made) for made in about["validations"]),
        best,
        tensors.get("ranges"),
        family,
    )

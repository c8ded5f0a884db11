"""Fine-tuning: the parameters φ of a pre-trained rule adapted to one federation, where a validation loss falls.

    φ_{m+1} = φ_m − η Adam(g_0, …, g_m),   g_m = ∇L_m(φ_m) / ‖∇L_m(φ_m)‖,   φ_0 the rule's own
    V_m = (1/T) Σ_t F_v(w^(t)) under φ_m,   what is returned has the φ_m of the smallest V_m

L_m is the outer loss "every-round" (`unfolding.outer_loss`) in a run m under φ_m. A step of Adam from gradients of
length 1 moves no parameter much further than η, however steep the loss is: a few steps cannot ruin a rule.

Validation is on other rows and in another run. Every client holds out some of its rows, which no step trains on or
differentiates; F_v is the mean loss on all of them. Initial model, minibatches and absences are those of no step, and
the same ones under every φ_m, so that only φ makes a difference. F_v is not class-balanced as L_m is: a class of which
a few rows are held out would decide alone. The test set is never used.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fedunfold.api import described, federation_digest
from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.params import ModelFactory, device_of, fingerprint
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.settings import is_count
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.checkpoint import Checkpoint, Tensors
from fedunfold.rules.parametric import ParametricRule, flattened, unflattened
from fedunfold.rules.pretrained import pretrained
from fedunfold.rules.rule import describe_rule
from fedunfold.tracking import Callback, callback_scope
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.unfolding.learner import check_learnable
from fedunfold.unfolding.rule_gradient import rule_gradient
from fedunfold.unfolding.state import Adam
from fedunfold.version import VERSION

log = logging.getLogger(__name__)
VALIDATION = "validation"
"""Names the randomness of the run that φ is validated by."""
BETAS = (0.9, 0.99)
SUFFIX = "-tuned"
LONGEST_NAME = 100


@dataclass(frozen=True, repr=False)
class FineTuned:
    """What came of fine-tuning.

    Attributes:
        rule: The rule with the best parameters; where no step lowered the validation loss, the one it began with.
        losses: The validation loss V before the first step and after each; infinite where training diverged.
        step: After which step the rule's parameters were found; 0 for those it began with.
        runs: What it cost in runs of the federation; a backward pass through all clients counts as one.
        settings: How it was done, as plain values.
    """

    rule: ParametricRule
    losses: tuple[float, ...]
    step: int
    runs: int
    settings: Mapping[str, Any]

    @property
    def kept(self) -> bool:
        """Whether the rule is another one than before."""
        return self.step > 0

    @property
    def verdict(self) -> str:
        """What came of it, in a sentence without its full stop."""
        before, made = f"{self.losses[0]:.4g}", len(self.losses) - 1
        if self.kept:
            after = f"after step {self.step} of {made}"
            return f"{self.rule.name}: the validation loss fell from {before} to {self.losses[self.step]:.4g} {after}"
        tried = f"none of {made} steps lowered" if made else "no step could be made from"
        return f"{self.rule.name} stays as it is: {tried} its validation loss of {before}"

    def __repr__(self) -> str:
        return f"{self.verdict}; {self.runs} runs of the federation."


def fine_tune(
    env: Environment | str | Path,
    rule: ParametricRule | str | Path | None = None,
    *,
    steps: int = 3,
    lr: float = 0.003,
    adjoint: AdjointKind = "exact",
    validation: float = 0.2,
    algorithm: Algorithm | None = None,
    model: ModelFactory | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> FineTuned:
    """Adapt a pre-trained rule to one federation in a few outer steps, or leave it as it is where none of them helps.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        rule: The rule, its name or its file, as for `pretrained`.
        steps: How many outer steps there are at most.
        lr: η, about how far a step moves each parameter.
        adjoint: "exact", by which rules are learned, or "first_order", for which clients compute nothing backward.
        validation: The part of its rows that each client holds out to validate by.
        algorithm: How clients and server train; by default as the rule says.
        model: A function that builds a classifier in place of the environment's own.
        device: ``cpu`` or ``cuda``.
        dtype: The precision of the models.
        checkpoint: A file from which an interrupted call is resumed.
        callback: Called after every validation.

    Returns:
        The rule, its validation losses, and what it cost.

    Raises:
        InputError: The rule cannot be learned through the algorithm, or something does not fit the environment.
        DivergenceError: Training left the finite numbers under the rule as it was given.

    >>> import fedunfold as fu
    >>> tuned = fu.fine_tune("digits-label-skew", steps=1)
    >>> tuned.kept, tuned.rule.name, tuned.losses[1] < tuned.losses[0]
    (True, 'open@1-tuned', True)
    """
    env, start = environment(env), _rule(rule, algorithm)
    _check(steps, lr, adjoint)
    used = start.algorithm or Algorithm()
    check_learnable(used)
    data = env.load().held_out(validation, env.seed)
    federation = SimulatedFederation(env, data, model=model, device=device_of(device), dtype=dtype)
    tuning = _Tuning(federation, start, used, lr, adjoint)
    settings: dict[str, Any] = {"steps": steps, "lr": lr, "adjoint": adjoint, "validation": validation}
    settings |= {"rule": start.name, "algorithm": used.describe()}
    store = None
    if checkpoint is not None:
        first = federation.initial_model(VALIDATION)  # stands for the seed, the model and the precision
        identity = settings | describe_rule(start) | {"digest": federation_digest(federation, model)}
        identity |= {"rounds": env.rounds, "start": fingerprint(first), "device": first.device.type, "version": VERSION}
        store = Checkpoint(checkpoint, "fine-tuning", identity)
    with callback_scope(callback, described("fine-tune", federation, dtype) | settings) as callbacks:
        progress = tuning.progress(steps, store, callbacks)
        step = min(range(len(progress.losses)), key=progress.losses.__getitem__)  # the earliest of equal ones
        tuned = tuning.finished(progress, step) if step else start
        callbacks.on_results([{"method": tuned.name, "step": step, "validation_loss": progress.losses[step]}])
    gradients = min(len(progress.losses), steps)  # the one that was not finite too
    backward = adjoint == "exact" or not used.local.uses_gradients_only
    runs = len(progress.losses) + gradients * (2 if backward else 1)
    return FineTuned(tuned, progress.losses, step, runs, settings)


def _rule(given: ParametricRule | str | Path | None, algorithm: Algorithm | None) -> ParametricRule:
    if not isinstance(given, ParametricRule | str | Path | None):
        raise InputError(f"what is fine-tuned is a pre-trained rule, its name or its file, not {given!r}.")
    found = given if isinstance(given, ParametricRule) else pretrained() if given is None else pretrained(given)
    return found if algorithm is None else replace(found, algorithm=algorithm)


def _check(steps: object, lr: object, adjoint: object) -> None:
    if not is_count(steps):
        raise InputError(f"fine-tuning takes a whole number of steps of at least 1, not {steps!r}.")
    if not (isinstance(lr, int | float) and 0 < lr < 1):
        raise InputError(f"the outer learning rate must lie between 0 and 1, not {lr!r}.")
    if adjoint not in get_args(AdjointKind):
        raise InputError(f"the adjoint is one of {', '.join(get_args(AdjointKind))}, not {adjoint!r}.")


@dataclass(frozen=True)
class _Progress:
    """After m steps.

    Attributes:
        path: φ_0 … φ_m in single precision, as they come to lie in a file, [m+1, P].
        losses: V_0 … V_m.
        optimizer: Adam's state.
    """

    path: Tensor
    losses: tuple[float, ...]
    optimizer: Adam

    def save(self, store: Checkpoint) -> None:
        losses = torch.tensor(self.losses, dtype=torch.float64)
        store.save({"path": self.path, "losses": losses, "m": self.optimizer.m, "v": self.optimizer.v})


@dataclass(frozen=True)
class _Tuning:
    """What all steps have in common."""

    federation: SimulatedFederation
    start: ParametricRule
    algorithm: Algorithm
    lr: float
    adjoint: AdjointKind

    @property
    def rounds(self) -> int:
        return self.federation.environment.rounds

    def rule(self, theta: Tensor) -> ParametricRule:
        """The rule with other parameters [P], for T rounds."""
        return replace(self.start, params=unflattened(theta.double(), self.start.params), horizon=self.rounds)

    def finished(self, progress: _Progress, step: int) -> ParametricRule:
        """The rule after a step, with a name of its own."""
        name = self.start.name.removesuffix(SUFFIX)[: LONGEST_NAME - len(SUFFIX)] + SUFFIX
        before, after = progress.losses[0], progress.losses[step]
        description = (
            f"{self.start.name} after {step} outer steps on the federation {self.federation.environment.name}: "
            f"validation loss {before:.4g} before, {after:.4g} after."
        )
        params = self.rule(progress.path[step]).params
        return replace(self.start, params=params, name=name, algorithm=self.algorithm, description=description)

    def progress(self, steps: int, store: Checkpoint | None, callbacks: Callback) -> _Progress:
        """Where it stands after the last step, or the last one that had a finite gradient."""
        progress = None if store is None else store.load(self._parsed)
        saved = 0 if progress is None else len(progress.losses)
        if 0 < saved <= steps:
            log.info("resuming from outer step %d of %d, saved in %s", saved - 1, steps, store and store.path)
        try:
            if progress is None:
                theta = flattened(self.start.params).float()
                progress = _Progress(theta[None], (self._validated(theta),), Adam.start(theta.double(), BETAS))
            callbacks.on_fine_tuning_step(len(progress.losses) - 1, steps, progress.losses[-1])
            for m in range(len(progress.losses), steps + 1):
                following = self._stepped(progress)
                if following is None:
                    break
                progress = following
                if store is not None and store.should_save:
                    progress.save(store)
                    saved = m + 1
                callbacks.on_fine_tuning_step(m, steps, progress.losses[-1])
        finally:
            if store is not None and progress is not None and len(progress.losses) > saved:
                progress.save(store)
        return progress

    def _stepped(self, progress: _Progress) -> _Progress | None:
        """One step further; None where there is no finite gradient to make it by."""
        m, outer = len(progress.losses) - 1, OUTER_LOSSES.make("every-round")
        given = self.federation, self.rule(progress.path[-1]), self.rounds, self.algorithm, outer, self.adjoint
        try:
            gradient = flattened(rule_gradient(*given, f"fine-tune-{m}").gradient)
        except DivergenceError:
            return None
        length = float(gradient.norm())
        if not (math.isfinite(length) and length > 0):
            return None
        theta, optimizer = progress.optimizer.step(progress.path[-1].double(), gradient / length, self.lr)
        path = torch.cat([progress.path, theta.float()[None]])
        try:
            loss = self._validated(path[-1])
        except DivergenceError:
            loss = math.inf
        return _Progress(path, (*progress.losses, loss), optimizer)

    def _validated(self, theta: Tensor) -> float:
        """V."""
        rule = self.rule(theta)
        (result,) = run_rounds(self.federation, rule, self.rounds, [VALIDATION], algorithm=self.algorithm)
        loss = sum(test.loss for test in result.evaluations) / len(result.evaluations)
        return loss if math.isfinite(loss) else math.inf

    def _parsed(self, tensors: Tensors, _: Any) -> _Progress:
        path, losses, m, v = (tensors[name] for name in ("path", "losses", "m", "v"))
        expected = len(losses), sum(value.numel() for value in self.start.params.values())
        if tuple(path.shape) != expected or not {m.shape, v.shape} == {path.shape[1:]} or not len(losses):
            raise ValueError("its tensors are of different sizes")
        return _Progress(path, tuple(losses.tolist()), Adam(m, v, len(losses) - 1, BETAS))

"""The convergence bound against local SGD on quadratics, where all its constants are known."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedunfold.core.parts import LocalOptimizer
from fedunfold.local import accumulated, nova, sgd
from fedunfold.studies.theory.analysis import analyse
from fedunfold.studies.theory.quantities import Constants, Theory


@dataclass(frozen=True)
class Walk:
    """What a federated run on quadratics met: mean_t ‖∇f(w^(t))‖², and the theorem's view of it."""

    gradient: float
    theory: Theory


@dataclass(frozen=True)
class Quadratics:
    """f_k(w) = ½ (w − c_k)ᵀ H (w − c_k), H diagonal and the same for all, so that β = 1 and L = max H.

    Σ_k ω_k‖∇f_k‖² − ‖Σ_k ω_k ∇f_k‖² is a variance of the H c_k, at most max_k ‖H c_k‖²: this is κ². Gradients
    carry Gaussian noise of total variance σ². Several runs side by side stand for the expectation.
    """

    curvature: np.ndarray
    centres: np.ndarray
    sigma: float = 0.0
    runs: int = 20

    def walk(
        self,
        start: np.ndarray,
        weights: np.ndarray,
        sizes: np.ndarray,
        steps: np.ndarray,
        lr: float,
        update: LocalOptimizer,
        *,
        recast: bool = False,
    ) -> Walk:
        """Local SGD from `start`, averaged with Θ, then put beside the bound with its known constants."""
        stream = np.random.default_rng(0)
        shape = (self.runs, *self.centres.shape)
        spread = self.sigma / np.sqrt(len(self.curvature))
        objective = analyse(weights, sizes, steps, lr, update, recast=recast).objective
        optimum = np.array(objective) @ self.centres
        w = np.tile(start, (self.runs, 1))
        squares, largest = [], 0.0
        for row, counts in zip(weights, steps, strict=True):
            squares.append((((w - optimum) * self.curvature) ** 2).sum(1).mean())
            inside, after = update.scales(sizes, counts, lr)
            local = np.repeat(w[:, None], len(sizes), axis=1)
            for step in range(counts.max()):
                gradient = self.curvature * (local - self.centres)
                largest = max(largest, float((gradient**2).sum(-1).max()))
                noise = stream.normal(scale=spread, size=shape) if self.sigma else 0.0
                scale = lr * inside * (step < counts)
                local = local - scale[:, None] * (gradient + noise)
            w = w + np.einsum("k,rkd->rd", row * after, local - w[:, None])
        constants = Constants(
            L=float(self.curvature.max()),
            sigma=self.sigma,
            G=float(np.sqrt(largest + self.sigma**2)),
            kappa=float(np.sqrt(((self.centres * self.curvature) ** 2).sum(1).max())),
            beta=1,
            gap=float(0.5 * (self.curvature * (start - optimum) ** 2).sum()),
        )
        theory = analyse(weights, sizes, steps, lr, update, constants, recast=recast)
        return Walk(float(np.mean(squares)), theory)


def holding(walk: Walk) -> None:
    assert all(condition.holds for condition in walk.theory.conditions), walk.theory.conditions


@pytest.mark.parametrize(("update", "steps"), [(sgd(), [5, 5]), (nova(), [2, 8]), (accumulated(sgd()), [2, 8])])
def test_without_noise_and_skew_the_first_term_alone_bounds(update: LocalOptimizer, steps: list[int]) -> None:
    rounds = 200
    same = Quadratics(np.linspace(0.2, 2, 10), np.zeros((2, 10)), runs=1)
    seen = same.walk(
        np.ones(10), np.full((rounds, 2), 0.5), np.array([5, 5]), np.tile(steps, (rounds, 1)), 0.01, update
    )
    holding(seen)
    assert seen.theory.bound.start is not None
    assert seen.theory.bound.total == seen.theory.bound.start
    assert seen.theory.bound.start / 100 < seen.gradient < seen.theory.bound.start


CASES = [(sgd(), [6, 6], False), (nova(), [2, 9], False), (accumulated(sgd()), [2, 9], False)]


@pytest.mark.parametrize(("update", "steps", "recast"), [*CASES, (sgd(), [2, 9], True)])
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_the_bound_holds_with_noise_and_skew(
    update: LocalOptimizer, steps: list[int], recast: bool, sigma: float
) -> None:
    rounds = 60
    centres = np.array([[1.0, 0, 0.5], [-1, 0, -0.5]])
    skewed = Quadratics(np.array([1.0, 0.5, 2]), centres, sigma)
    weights = np.tile([0.3, 0.7], (rounds, 1))
    seen = skewed.walk(
        np.full(3, 2.0), weights, np.array([40, 60]), np.tile(steps, (rounds, 1)), 0.01, update, recast=recast
    )
    holding(seen)
    assert seen.theory.bound.total is not None
    assert seen.theory.bound.total / 100 < seen.gradient < seen.theory.bound.total


@pytest.mark.parametrize(("update", "steps", "recast"), CASES)
def test_the_bound_holds_for_weights_that_vary(update: LocalOptimizer, steps: list[int], recast: bool) -> None:
    rounds = 60
    skewed = Quadratics(np.array([1.0, 2]), np.array([[3.0, 0], [-3, 0]]), sigma=1.0)
    swinging = 0.5 + 0.4 * np.cos(np.pi * np.arange(rounds))
    weights = np.stack([swinging, 1 - swinging], axis=1)
    seen = skewed.walk(
        np.zeros(2), weights, np.array([50, 50]), np.tile(steps, (rounds, 1)), 0.01, update, recast=recast
    )
    holding(seen)
    assert seen.theory.mean_variance == pytest.approx(0.16)
    assert seen.theory.bound.total is not None
    assert seen.gradient < seen.theory.bound.total


def test_the_published_bound_is_exceeded_by_many_noisy_steps() -> None:
    """One client, τ = 32: the noise settles at ‖∇f‖² ≈ ηLσ²/2, and the published term is 4ηLσ²/τ."""
    rounds, lr, sigma = 300, 5e-4, 1.0
    noisy = Quadratics(np.ones(20), np.zeros((1, 20)), sigma, runs=20)
    seen = noisy.walk(np.zeros(20), np.ones((rounds, 1)), np.array([1]), np.full((rounds, 1), 32), lr, sgd())
    holding(seen)
    assert seen.theory.published_bound.total is not None
    assert seen.theory.bound.total is not None
    assert seen.theory.published_bound.total < 0.8 * seen.gradient
    assert seen.gradient < seen.theory.bound.total < 100 * seen.gradient


def test_unequal_plain_steps_are_outside_the_theorem_unless_recast() -> None:
    """Plain SGD with τ = (1, 9) under equal weights goes to (c_0 + 9 c_1)/10, where f's gradient is not 0."""
    rounds, steps = 400, np.tile([1, 9], (400, 1))
    pair = Quadratics(np.ones(1), np.array([[1.0], [-1.0]]), runs=1)
    given_ = (np.array([-0.8]), np.full((rounds, 2), 0.5), np.array([1, 1]), steps, 0.01, sgd())
    plain, recast = pair.walk(*given_), pair.walk(*given_, recast=True)
    assert [condition.holds for condition in plain.theory.conditions] == [True] * 4 + [False]
    assert plain.theory.bound.total is not None
    assert plain.gradient > 2 * plain.theory.bound.total
    holding(recast)
    assert recast.theory.bound.total is not None
    assert recast.gradient < recast.theory.bound.total

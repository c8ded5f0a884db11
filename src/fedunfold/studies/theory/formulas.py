"""The quantities of the theorem, one function each."""

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LocalOptimizer
from fedunfold.studies.theory.quantities import Condition, Constants, Factors, product


def weight_variances(weights: np.ndarray) -> np.ndarray:
    """V_k = (1/T) Σ_t (Θ_k^(t) − mean_t Θ_k)² of Θ[T, K].

    >>> weight_variances(np.array([[0.75, 0.25], [0.25, 0.75]])).tolist()
    [0.0625, 0.0625]
    """
    # Relative to the first round, so that weights that never change have a variance of 0, not of 1e-34.
    return np.asarray(np.var(weights - weights[0], axis=0))


def local_factors(steps: np.ndarray, sizes: np.ndarray, lr: float, update: LocalOptimizer) -> Factors:
    """The norms of a_k^(t) for steps τ[T, K]; in-loop nova has a_k = c_k = τ_eff/τ_k at each of its steps.

    Args:
        steps: τ, [T, K].
        sizes: N_k, [K].
        lr: η.
        update: The local update.

    Raises:
        InputError: A factor is negative.
    """
    counts, index = np.unique(steps, return_inverse=True)
    rows = [update.gradient_factors(int(n), lr) for n in counts]
    if any((row < 0).any() for row in rows):
        raise InputError(f"the bound needs lr · mu <= 1, not {lr:g} · {update.fused_mu or 0:g}.")
    index = index.reshape(steps.shape)
    scale = np.array([update.scales(sizes, row, lr)[0] for row in steps])
    return Factors(
        l1=scale * np.array([row.sum() for row in rows])[index],
        squared=scale**2 * np.array([row @ row for row in rows])[index],
        last=scale * np.array([row[-1] for row in rows])[index],
    )


def effective_steps(factors: Factors, sizes: np.ndarray) -> np.ndarray:
    """τ_eff^(t) = Σ_k (N_k/N) ‖a_k^(t)‖₁, as [T].

    Args:
        factors: Of the local updates.
        sizes: N_k, [K].
    """
    return np.asarray(factors.l1 @ (sizes / sizes.sum()))


def recast_weights(weights: np.ndarray, factors: Factors) -> tuple[np.ndarray, np.ndarray]:
    """Θ̃[T, K] and τ_eff[T] with which plain averaging takes the theorem's form.

    A client whose local steps are not scaled goes ‖a_k‖₁ d_k, not τ_eff d_k. The round is the same one with

        τ_eff^(t) = Σ_k Θ_k^(t) ‖a_k‖₁        Θ̃_k^(t) = Θ_k^(t) ‖a_k‖₁ / τ_eff^(t)
    """
    reach = weights * factors.l1
    total = reach.sum(1)
    return reach / total[:, None], total


def a_tilde(weights: np.ndarray, factors: Factors, effective: np.ndarray) -> float:
    """Ã = (K/T) Σ_t τ_eff^(t) Σ_k (Θ_k^(t))² ‖a_k‖² / ‖a_k‖₁²; the published one has no τ_eff^(t).

    Args:
        weights: Θ, [T, K].
        factors: Of the local updates.
        effective: τ_eff^(t), [T]; ones for the published value.
    """
    per_round = (weights**2 * factors.squared / factors.l1**2).sum(1)
    return float(weights.shape[1] * np.mean(effective * per_round))


def b_tilde_parts(weights: np.ndarray, factors: Factors) -> np.ndarray:
    """(1/T) Σ_t θ_k (‖a_k‖² − a_{k,−1}²) for every k.

    B̃ is their sum; the published B̃ has no Σ_k, and so is one of them.

    Args:
        weights: Θ, [T, K].
        factors: Of the local updates.
    """
    return np.asarray(weights.mean(0) * (factors.squared - factors.last**2).mean(0))


def c_tilde(factors: Factors) -> float:
    """C̃ = (1/T) Σ_t max_k ‖a_k‖₁ (‖a_k‖₁ − a_{k,−1})."""
    return float((factors.l1 * (factors.l1 - factors.last)).max(1).mean())


def d_per_l2(factors: Factors, lr: float) -> float:
    """D/L² = 4 η² max_{t,k} ‖a_k‖₁ (‖a_k‖₁ − a_{k,−1}).

    Args:
        factors: Of the local updates.
        lr: η.
    """
    return float(4 * lr**2 * (factors.l1 * (factors.l1 - factors.last)).max())


def conditions(
    factors: Factors, effective: np.ndarray, reach: np.ndarray, lr: float, constants: Constants
) -> tuple[Condition, ...]:
    """What the derivation relies on.

    Args:
        factors: Of the local updates.
        effective: τ_eff^(t), [T].
        reach: How many steps of d_k each client's model goes, [T, K].
        lr: η.
        constants: What is known of the objective.
    """
    largest = product(float(effective.max()) * lr, constants.L)
    beta = constants.beta
    return (
        Condition("max_t τ_eff η L <= 1", "the published step that drops ‖Σ Θ_k h_k‖²", largest, "<=", 1.0),
        Condition(
            "max_t τ_eff η L <= 1/2",
            "the same step where noise and drift are correlated (some τ_k > 1 and σ > 0)",
            largest,
            "<=",
            0.5,
        ),
        Condition(
            "D <= 1/(4β² + 1)",
            "the local drift is absorbed by ‖∇f‖²",
            product(d_per_l2(factors, lr), constants.L, constants.L),
            "<=",
            None if beta is None else 1 / (4 * beta**2 + 1),
        ),
        Condition(
            "max_t τ_eff = min_t τ_eff",
            "the sum of f(w^(t)) − f(w^(t+1)) over the rounds telescopes",
            float(effective.max()),
            "=",
            float(effective.min()),
        ),
        Condition(
            "max_{t,k} |‖a_k‖₁ − τ_eff| = 0",
            "every client's model goes τ_eff steps, as in the theorem (else recast the weights)",
            float(np.abs(reach - effective[:, None]).max()),
            "=",
            0.0,
        ),
    )

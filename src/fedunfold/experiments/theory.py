"""The convergence bound of deep-unfolded weights, worked out for one run.

The theorem is about w^(t+1) = w^(t) − η τ_eff^(t) Σ_k Θ_k^(t) d_k^(t), where d_k is the mean of client k's
stochastic gradients weighted by a_k, and about f = Σ_k θ_k f_k with θ_k = mean_t Θ_k^(t). It derives

    (1/T) Σ_t E‖∇f(w^(t))‖² ≤ 4 (f(w^(0)) − f_inf) / (T τ_eff η)      start
                            + 4 η L σ² Ã / K                          noise
                            + 10 η² L² σ² B̃                           local noise
                            + 20 η² L² κ² C̃                           dissimilarity
                            + 4 · 2^K (σ² + G²) Σ_k V_k               varying weights

for L-smooth f_k, gradient noise of variance ≤ σ², E‖∇ℓ‖² ≤ G² and Σ_k ω_k‖∇f_k‖² ≤ β²‖Σ_k ω_k ∇f_k‖² + κ².
Two factors got lost on the way to the published Ã and B̃. They are restored here; the published values are
given beside them.

Reference: Nakai-Kasai and Wadayama, deep unfolding-based weighted averaging, Theorem 1 and its appendix.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from fedunfold.environments import Environment
from fedunfold.errors import InputError
from fedunfold.experiments.methods import learned_method
from fedunfold.simulation.schedule import Share
from fedunfold.updates import LocalUpdate
from fedunfold.weighting.learned import LearnedWeights
from fedunfold.weighting.rule import off_simplex


@dataclass(frozen=True)
class Constants:
    """What the assumptions know of the objective. What needs a constant that is None is left out.

    `L` is the smoothness, `sigma` and `G` bound the stochastic gradients' deviation and root mean square,
    `kappa` and `beta` the clients' dissimilarity, `gap` is f(w^(0)) − f_inf.
    """

    L: float | None = None
    sigma: float | None = None
    G: float | None = None
    kappa: float | None = None
    beta: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            least = 1 if field.name == "beta" else 0
            above = value > least if field.name == "L" else value >= least
            if not (above and math.isfinite(value)):
                sign = ">" if field.name == "L" else ">="
                raise InputError(f"the constant {field.name} must be a finite number {sign} {least}, not {value}.")


@dataclass(frozen=True)
class Factors:
    """‖a_k‖₁, ‖a_k‖² and the last entry a_{k,−1} of every client in every round, each [T, K]."""

    l1: np.ndarray
    squared: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class Condition:
    """Something the derivation needs, with both of its sides; None where a constant was not given."""

    statement: str
    reason: str
    left: float | None
    relation: Literal["<=", "="]
    right: float | None

    @property
    def holds(self) -> bool | None:
        if self.left is None or self.right is None:
            return None
        # Both sides of an equation are sums of floats, so that it holds only up to rounding.
        equal = math.isclose(self.left, self.right, rel_tol=1e-9, abs_tol=1e-9)
        return equal or (self.relation == "<=" and self.left < self.right)


@dataclass(frozen=True)
class Terms:
    """The bound's five terms, in its order; None where a constant was not given."""

    start: float | None
    noise: float | None
    local_noise: float | None
    dissimilarity: float | None
    varying_weights: float | None

    @property
    def total(self) -> float | None:
        terms = [term for term in vars(self).values() if term is not None]
        return math.fsum(terms) if len(terms) == 5 else None


@dataclass(frozen=True)
class Theory:
    """What the theorem says about one run of T rounds and K clients.

    `variances` are V_k, `objective` is θ, `mean_steps` is τ̃, `effective_steps` is τ_eff^(t). The published B̃
    leaves k open: `b_tilde_published` has its value for every k, and the published bound takes the largest.
    `d_per_l2` is D/L². `rate_lr` = √(K/(τ̃T)) is the step size for which the rate is stated.
    """

    rounds: int
    clients: int
    lr: float
    rate_lr: float
    recast: bool
    objective: tuple[float, ...]
    variances: tuple[float, ...]
    mean_steps: float
    effective_steps: tuple[float, ...]
    a_tilde: float
    a_tilde_published: float
    b_tilde: float
    b_tilde_published: tuple[float, ...]
    c_tilde: float
    d_per_l2: float
    constants: Constants
    conditions: tuple[Condition, ...]
    bound: Terms
    published_bound: Terms

    @property
    def mean_variance(self) -> float:
        """(1/K) Σ_k V_k, to be held against 1/√T."""
        return math.fsum(self.variances) / self.clients

    @property
    def variance_scale(self) -> float:
        """1/√T: weights that vary less do not slow the convergence down."""
        return 1 / math.sqrt(self.rounds)

    @property
    def mean_effective_steps(self) -> float:
        """τ_eff = (1/T) Σ_t τ_eff^(t)."""
        return math.fsum(self.effective_steps) / self.rounds

    @property
    def d(self) -> float | None:
        """D, where L is known."""
        return _product(self.d_per_l2, self.constants.L, self.constants.L)

    def as_json(self) -> dict[str, Any]:
        """Plain values; null for what was not given, and for a number too large to write."""
        document = asdict(self) | {
            "mean_variance": self.mean_variance,
            "variance_scale": self.variance_scale,
            "mean_effective_steps": self.mean_effective_steps,
            "d": self.d,
            "conditions": [asdict(condition) | {"holds": condition.holds} for condition in self.conditions],
            "bound": asdict(self.bound) | {"total": self.bound.total},
            "published_bound": asdict(self.published_bound) | {"total": self.published_bound.total},
        }
        plain: dict[str, Any] = _plain(document)
        return plain


def weight_variances(weights: np.ndarray) -> np.ndarray:
    """V_k = (1/T) Σ_t (Θ_k^(t) − mean_t Θ_k)² of Θ[T, K].

    >>> weight_variances(np.array([[0.75, 0.25], [0.25, 0.75]])).tolist()
    [0.0625, 0.0625]
    """
    # Relative to the first round, so that weights that never change have a variance of 0, not of 1e-34.
    return np.asarray(np.var(weights - weights[0], axis=0))


def local_factors(steps: np.ndarray, sizes: np.ndarray, lr: float, update: LocalUpdate) -> Factors:
    """The norms of a_k^(t) for steps τ[T, K]; in-loop nova has a_k = c_k = τ_eff/τ_k at each of its steps."""
    counts, index = np.unique(steps, return_inverse=True)
    rows = [update.gradient_factors(int(n), lr) for n in counts]
    if any((row < 0).any() for row in rows):
        raise InputError(f"the bound needs lr · mu <= 1, not {lr:g} · {update.mu:g}.")
    index = index.reshape(steps.shape)
    scale = np.array([update.scales(sizes, row, lr)[0] for row in steps])
    return Factors(
        l1=scale * np.array([row.sum() for row in rows])[index],
        squared=scale**2 * np.array([row @ row for row in rows])[index],
        last=scale * np.array([row[-1] for row in rows])[index],
    )


def effective_steps(factors: Factors, sizes: np.ndarray) -> np.ndarray:
    """τ_eff^(t) = Σ_k (N_k/N) ‖a_k^(t)‖₁, as [T]."""
    return np.asarray(factors.l1 @ (sizes / sizes.sum()))


def recast_weights(weights: np.ndarray, factors: Factors) -> tuple[np.ndarray, np.ndarray]:
    """Θ̃[T, K] and τ_eff[T] with which plain averaging takes the theorem's form.

    A client that walks unscaled goes ‖a_k‖₁ d_k, not τ_eff d_k. The round is the same one with

        τ_eff^(t) = Σ_k Θ_k^(t) ‖a_k‖₁        Θ̃_k^(t) = Θ_k^(t) ‖a_k‖₁ / τ_eff^(t)
    """
    reach = weights * factors.l1
    total = reach.sum(1)
    return reach / total[:, None], total


def a_tilde(weights: np.ndarray, factors: Factors, effective: np.ndarray) -> float:
    """Ã = (K/T) Σ_t τ_eff^(t) Σ_k (Θ_k^(t))² ‖a_k‖² / ‖a_k‖₁²; the published one has no τ_eff^(t)."""
    per_round = (weights**2 * factors.squared / factors.l1**2).sum(1)
    return float(weights.shape[1] * np.mean(effective * per_round))


def b_tilde_parts(weights: np.ndarray, factors: Factors) -> np.ndarray:
    """(1/T) Σ_t θ_k (‖a_k‖² − a_{k,−1}²) for every k.

    B̃ is their sum; the published B̃ has no Σ_k, and so is one of them.
    """
    return np.asarray(weights.mean(0) * (factors.squared - factors.last**2).mean(0))


def c_tilde(factors: Factors) -> float:
    """C̃ = (1/T) Σ_t max_k ‖a_k‖₁ (‖a_k‖₁ − a_{k,−1})."""
    return float((factors.l1 * (factors.l1 - factors.last)).max(1).mean())


def d_per_l2(factors: Factors, lr: float) -> float:
    """D/L² = 4 η² max_{t,k} ‖a_k‖₁ (‖a_k‖₁ − a_{k,−1})."""
    return float(4 * lr**2 * (factors.l1 * (factors.l1 - factors.last)).max())


def bound_terms(
    *,
    a_tilde: float,
    b_tilde: float,
    c_tilde: float,
    variances: Sequence[float],
    effective_steps: float,
    rounds: int,
    lr: float,
    constants: Constants,
) -> Terms:
    """The five terms of the bound at the top of this module, for given coefficients and constants."""
    clients, L, sigma, kappa = len(variances), constants.L, constants.sigma, constants.kappa
    second_moment = None if sigma is None or constants.G is None else sigma**2 + constants.G**2
    try:
        spread = math.ldexp(4 * math.fsum(variances), clients)
    except OverflowError:  # 2^K of a large federation
        spread = math.inf
    return Terms(
        start=_product(4 / (rounds * effective_steps * lr), constants.gap),
        noise=_product(4 * lr * a_tilde / clients, L, sigma, sigma),
        local_noise=_product(10 * lr**2 * b_tilde, L, L, sigma, sigma),
        dissimilarity=_product(20 * lr**2 * c_tilde, L, L, kappa, kappa),
        varying_weights=_product(spread, second_moment),
    )


def conditions(
    factors: Factors, effective: np.ndarray, reach: np.ndarray, lr: float, constants: Constants
) -> tuple[Condition, ...]:
    """What the derivation relies on; `reach`[T, K] is how many steps of d_k each client's model goes."""
    largest = _product(float(effective.max()) * lr, constants.L)
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
            _product(d_per_l2(factors, lr), constants.L, constants.L),
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


def analyse(
    weights: np.ndarray,
    sizes: np.ndarray,
    steps: np.ndarray,
    lr: float,
    update: LocalUpdate,
    constants: Constants | None = None,
    *,
    recast: bool = False,
) -> Theory:
    """Everything above for weights Θ[T, K], N_k[K], steps τ[T, K], η and a local update.

    With `recast`, clients that walk unscaled (sgd, prox, momentum) are described by the weights and τ_eff of
    `recast_weights`, for which the theorem is about the run as it is; all figures then belong to those.
    """
    constants = constants or Constants()
    recast = recast and not (update.accumulate or update.normalise_steps)
    weights, sizes, steps = _checked(weights, sizes, steps, lr)
    factors = local_factors(steps, sizes, lr, update)
    effective = effective_steps(factors, sizes)
    if recast:
        weights, effective = recast_weights(weights, factors)
    rescaled = recast or update.accumulate
    reach = np.broadcast_to(effective[:, None], steps.shape) if rescaled else factors.l1
    rounds, clients = weights.shape
    variances = weight_variances(weights)
    mean_steps = float(steps.mean(1).mean())
    a, a_published = (a_tilde(weights, factors, scale) for scale in (effective, np.ones(rounds)))
    b = b_tilde_parts(weights, factors)
    c = c_tilde(factors)

    def bound(a: float, b: float) -> Terms:
        return bound_terms(
            a_tilde=a,
            b_tilde=b,
            c_tilde=c,
            variances=variances.tolist(),
            effective_steps=float(effective.mean()),
            rounds=rounds,
            lr=lr,
            constants=constants,
        )

    return Theory(
        rounds=rounds,
        clients=clients,
        lr=lr,
        rate_lr=math.sqrt(clients / (mean_steps * rounds)),
        recast=recast,
        objective=tuple(weights.mean(0).tolist()),
        variances=tuple(variances.tolist()),
        mean_steps=mean_steps,
        effective_steps=tuple(effective.tolist()),
        a_tilde=a,
        a_tilde_published=a_published,
        b_tilde=float(b.sum()),
        b_tilde_published=tuple(b.tolist()),
        c_tilde=c,
        d_per_l2=d_per_l2(factors, lr),
        constants=constants,
        conditions=conditions(factors, effective, reach, lr, constants),
        bound=bound(a, float(b.sum())),
        published_bound=bound(a_published, float(b.max())),
    )


def analyse_learned(
    learned: LearnedWeights,
    env: Environment,
    constants: Constants | None = None,
    *,
    recast: bool = False,
) -> Theory:
    """The same for learned weights and the environment they were learned on, every client always present.

    Clients make τ_k^(t) = E_k^(t) ⌈N_k/B⌉ steps of the local update that the weights were learned for.
    """
    data = env.load()
    fitting = learned.applied_to(data.keys, env.rounds, env.digest(data))
    steps = [
        [
            Share(key, 0, size, env.epochs(k, t)).steps(env.batch_size)
            for k, (key, size) in enumerate(zip(data.keys, data.sizes, strict=True))
        ]
        for t in range(env.rounds)
    ]
    return analyse(
        fitting.weights.numpy(),
        np.array(data.sizes),
        np.array(steps),
        env.lr,
        learned_method(fitting).algorithm.update,
        constants,
        recast=recast,
    )


def _checked(
    weights: np.ndarray, sizes: np.ndarray, steps: np.ndarray, lr: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights, sizes, steps = np.asarray(weights, np.float64), np.asarray(sizes), np.asarray(steps)
    if weights.ndim != 2 or not weights.size:
        raise InputError(f"weights must be a table [rounds, clients], not of shape {list(weights.shape)}.")
    if steps.shape != weights.shape or sizes.shape != weights.shape[1:]:
        raise InputError(
            f"weights {list(weights.shape)}, steps {list(steps.shape)} and sizes {list(sizes.shape)} must be "
            "[T, K], [T, K] and [K]."
        )
    names = [str(k) for k in range(len(sizes))]
    for t, row in enumerate(weights):
        if problem := off_simplex(torch.from_numpy(row.copy()), names):
            raise InputError(f"weights: round {t} {problem}.")
    if not (sizes > 0).all():
        raise InputError("sizes must be positive: every client holds at least one sample.")
    if not (np.issubdtype(steps.dtype, np.integer) and (steps >= 1).all()):
        raise InputError("steps must be whole numbers >= 1: the theorem has every client train in every round.")
    if not (lr > 0 and math.isfinite(lr)):
        raise InputError(f"lr must be a finite number > 0, not {lr}.")
    return weights, sizes, steps


def _product(factor: float, *constants: float | None) -> float | None:
    known = [constant for constant in constants if constant is not None]
    if len(known) < len(constants):
        return None
    # A zero wins over a factor that overflowed.
    return 0.0 if 0 in known else math.prod(known, start=factor)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What the theorem assumes about a run and what it says, as plain data."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from fedunfold.core.errors import InputError


@dataclass(frozen=True)
class Constants:
    """What the assumptions know of the objective. What needs a constant that is None is left out.

    Attributes:
        L: Smoothness of the clients' losses, > 0.
        sigma: Bounds the standard deviation of a stochastic gradient.
        G: Bounds its root mean square.
        kappa: Dissimilarity κ of the clients.
        beta: Dissimilarity β of the clients, >= 1.
        gap: f(w^(0)) − f_inf.
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
    """Norms of the gradient factors a_k of every client in every round, each [T, K].

    Attributes:
        l1: ‖a_k‖₁.
        squared: ‖a_k‖².
        last: The last entry a_{k,−1}.
    """

    l1: np.ndarray
    squared: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class Condition:
    """Something the derivation needs.

    Attributes:
        statement: What has to hold.
        reason: What it is needed for.
        left: Its left side; None where a constant was not given.
        relation: Between both sides.
        right: Its right side; None where a constant was not given.
    """

    statement: str
    reason: str
    left: float | None
    relation: Literal["<=", "="]
    right: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None where a constant was not given."""
        if self.left is None or self.right is None:
            return None
        # Both sides of an equation are sums of floats, so that it holds only up to rounding.
        equal = math.isclose(self.left, self.right, rel_tol=1e-9, abs_tol=1e-9)
        return equal or (self.relation == "<=" and self.left < self.right)


@dataclass(frozen=True)
class Terms:
    """The bound's five terms; None where a constant was not given.

    Attributes:
        start: Of the distance to the optimum.
        noise: Of the stochastic gradients.
        local_noise: Of the noise that accumulates in local steps.
        dissimilarity: Of the clients.
        varying_weights: Of weights that change over the rounds.
    """

    start: float | None
    noise: float | None
    local_noise: float | None
    dissimilarity: float | None
    varying_weights: float | None

    @property
    def total(self) -> float | None:
        """The bound, where all terms are known."""
        terms = [term for term in vars(self).values() if term is not None]
        return math.fsum(terms) if len(terms) == 5 else None


@dataclass(frozen=True)
class Theory:
    """What the theorem says about one run.

    Attributes:
        rounds: T.
        clients: K.
        lr: η.
        rate_lr: √(K/(τ̃T)), the step size for which the rate is stated.
        recast: Whether weights and τ_eff are those of `recast_weights`.
        objective: θ_k = mean_t Θ_k^(t).
        variances: V_k.
        mean_steps: τ̃.
        effective_steps: τ_eff^(t).
        a_tilde: Ã.
        a_tilde_published: Ã as published.
        b_tilde: B̃.
        b_tilde_published: B̃ as published, which leaves k open, for every k; its bound takes the largest.
        c_tilde: C̃.
        d_per_l2: D/L².
        constants: What is known of the objective.
        conditions: What the derivation relies on.
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

    @property
    def bound(self) -> Terms:
        """The bound with the factors that got lost in the published one."""
        return self._bound(self.a_tilde, self.b_tilde)

    @property
    def published_bound(self) -> Terms:
        """The bound as published."""
        return self._bound(self.a_tilde_published, max(self.b_tilde_published))

    def _bound(self, a_tilde: float, b_tilde: float) -> Terms:
        """The five terms of the bound in `fedunfold.studies.theory`, for given coefficients."""
        L, sigma, kappa, G = self.constants.L, self.constants.sigma, self.constants.kappa, self.constants.G
        second_moment = None if sigma is None or G is None else sigma**2 + G**2
        try:
            spread = math.ldexp(4 * math.fsum(self.variances), self.clients)
        except OverflowError:  # 2^K of a large federation
            spread = math.inf
        return Terms(
            start=product(4 / (self.rounds * self.mean_effective_steps * self.lr), self.constants.gap),
            noise=product(4 * self.lr * a_tilde / self.clients, L, sigma, sigma),
            local_noise=product(10 * self.lr**2 * b_tilde, L, L, sigma, sigma),
            dissimilarity=product(20 * self.lr**2 * self.c_tilde, L, L, kappa, kappa),
            varying_weights=product(spread, second_moment),
        )

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
        return product(self.d_per_l2, self.constants.L, self.constants.L)

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
        plain: dict[str, Any] = json.loads(json.dumps(document), parse_constant=lambda _: None)
        return plain


def product(factor: float, *constants: float | None) -> float | None:
    """The product of all; None where a constant was not given."""
    known = [constant for constant in constants if constant is not None]
    if len(known) < len(constants):
        return None
    # A zero wins over a factor that overflowed.
    return 0.0 if 0 in known else math.prod(known, start=factor)

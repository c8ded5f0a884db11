"""What the theorem is told and what it says, as records."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from fedunfold.core.errors import InputError


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
        plain: dict[str, Any] = _plain(document)
        return plain


def product(factor: float, *constants: float | None) -> float | None:
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

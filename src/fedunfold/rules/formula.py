"""A rule in one line, whose parameters φ are a few exponents (`parametric`).

    Θ_k ∝ N_k · exp(Σ_f a_f z_kf) = N_k · Π_f x_kf^a_f             over the clients that enter the round
    s   = e^b · exp(Σ_g b_g z_g)  = e^b · Π_g x_g^b_g,   β and a constant

z = log x are the features (`features`), and x the ratios they are logarithms of: size N_k/mean N, redundancy
Σ_j p_j max(0, cos(m_k, m_j)), spread Σ_k p_k ‖m_k‖²/‖Σ_k p_k m_k‖², and so on. A power beyond e^±4 of a client, or s
beyond 10 or 1/10, counts as these.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Self

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS
from fedunfold.core.settings import Positive, Settings
from fedunfold.rules.arrays import Array, functions_of
from fedunfold.rules.features import RoundFeatures
from fedunfold.rules.parametric import LOG_STEP, MOMENTUM, SCORE, ParametricRule, bounded_share

SMALL = 0.1
"""Where the parameters of β and a start, at which these are 0.009 and 0.01: at 0 their gradients are 0."""
RATIOS = {
    "size": "(N_k / mean N)",
    "steps": "(steps_k / mean steps)",
    "norm": "(‖m_k‖ / root mean square ‖m‖)",
    "redundancy": "(Σ_j p_j max(0, cos(m_k, m_j)))",
    "presences": "((1 + rounds seen_k) / mean)",
    "staleness": "(1 + rounds since k was seen)",
    "spread": "(Σ p_k ‖m_k‖² / ‖Σ p_k m_k‖²)",
    "age": "(1 + t)",
    "clients": "(number of clients)",
    "effort": "(mean steps)",
}
"""What a feature that is a logarithm is the logarithm of."""
CLIENT_EXPONENTS = ("size", "steps", "norm", "redundancy", "staleness")
ROUND_EXPONENTS = ("spread", "age", "clients")
SHOWN = 0.005
"""A smaller exponent is shown as 0.00 at most, and left out."""


@dataclass(frozen=True, eq=False)
class FormulaRule(ParametricRule):
    """The rule as a formula; its parameters are `weight.F` and `step.G` for its features, `step`, `momentum`
    and `trust`."""

    name: str = "fedunfold-formula"
    client_features: tuple[str, ...] = CLIENT_EXPONENTS
    round_features: tuple[str, ...] = ROUND_EXPONENTS

    def __post_init__(self) -> None:
        super().__post_init__()
        names = list(self.shapes(0, self.client_features, self.round_features))
        if wrong := sorted(set(self.params) ^ set(names)):
            raise InputError(f"a formula needs exactly the numbers {', '.join(names)}; see '{wrong[0]}'.")
        if unknown := [name for name in (*self.client_features, *self.round_features) if name not in RATIOS]:
            raise InputError(f"a formula has no power of '{unknown[0]}'; choose among {', '.join(RATIOS)}.")

    @classmethod
    def initial(cls, width: int = 0, seed: int = 0) -> Self:
        """As it is before pre-training: FedAvg, with a little momentum. Nothing in it is drawn, or wide."""
        names = cls.shapes(0, CLIENT_EXPONENTS, ROUND_EXPONENTS)
        start = {name: SMALL if name in ("momentum", "trust") else 0.0 for name in names}
        return cls({name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()})

    @classmethod
    def shapes(
        cls, width: int, client_features: Sequence[str], round_features: Sequence[str]
    ) -> dict[str, tuple[int, ...]]:
        """Those of φ, by name, of a formula with these features: numbers."""
        names = [f"weight.{name}" for name in client_features] + [f"step.{name}" for name in round_features]
        return dict.fromkeys([*names, "step", "momentum", "trust"], ())

    def answers(self, found: RoundFeatures[Array]) -> tuple[Array, Array, Array, Array]:
        """The score [n], log s, β and a."""
        params = self.params_like(found.shares)
        score = found.of_clients @ self._of("weight", self.client_features, params)
        log_step = found.of_round @ self._of("step", self.round_features, params) + params["step"]
        momentum, trust = MOMENTUM * bounded_share(params["momentum"]), bounded_share(params["trust"])
        return score.clip(-SCORE, SCORE), log_step.clip(-LOG_STEP, LOG_STEP), momentum, trust

    def _of(self, what: str, names: Sequence[str], params: Mapping[str, Array]) -> Array:
        exponents = [params[f"{what}.{name}"] for name in names]
        stacked: Array = functions_of(exponents[0]).stack(exponents)
        return stacked

    def readable(self) -> str:
        """The formula with its numbers, a line each for the weights, the step size and the momentum."""
        powers = {
            kind: [
                f"{RATIOS[name]}^{value:.2f}"
                for name in names
                if abs(value := float(self.params[f"{kind}.{name}"])) >= SHOWN
            ]
            for kind, names in _parts(self)
        }
        constant, momentum = (
            math.exp(float(self.params["step"])),
            MOMENTUM * float(bounded_share(self.params["momentum"])),
        )
        trust = float(bounded_share(self.params["trust"]))
        return "\n".join(
            [
                "weight of client k ∝ " + " · ".join(["N_k", *powers["weight"]]),
                "step size s = " + " · ".join([f"{constant:.2f}", *powers["step"]]),
                f"momentum β = {momentum:.2f}, where w ← w + u with u ← s · (1 − β) · weighted mean of updates + β · u",
                f"trust a = {trust:.2f} in the server's optimiser, where 0 is plain averaging",
            ]
        )

    def __str__(self) -> str:
        return self.readable()


class FormulaText(Settings):
    """A formula as a person writes it: exponents by feature, s where all ratios are 1, β and a.

    Attributes:
        momentum: β.
        trust: a.
        step_size: s where all ratios are 1.
        weight: The exponents of ratios of clients.
        step: Those of the round.
        ranges: The smallest and the largest logarithm of each ratio that the formula was learned on.
    """

    momentum: float = Field(default=0.0, ge=0, lt=MOMENTUM)
    trust: float = Field(default=0.0, ge=0, lt=1)
    step_size: Positive = 1.0
    weight: dict[str, FiniteFloat] = Field(min_length=1)
    step: dict[str, FiniteFloat] = Field(min_length=1)
    ranges: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)

    @classmethod
    def of(cls, rule: FormulaRule) -> Self:
        """What a rule is written as, with four digits."""
        both = {kind: {name: _rounded(rule.params[f"{kind}.{name}"]) for name in names} for kind, names in _parts(rule)}
        names = (*rule.client_features, *rule.round_features)
        ranges = (
            {}
            if rule.ranges is None
            else {name: (_rounded(low), _rounded(high)) for name, (low, high) in zip(names, rule.ranges.T, strict=True)}
        )
        momentum, trust = (bounded_share(rule.params[name]) for name in ("momentum", "trust"))
        size = _rounded(rule.params["step"].exp())
        return cls(momentum=_rounded(MOMENTUM * momentum), trust=_rounded(trust), step_size=size, ranges=ranges, **both)

    def rule(self) -> FormulaRule:
        """The rule it says."""
        params = {f"weight.{name}": value for name, value in self.weight.items()}
        params |= {f"step.{name}": value for name, value in self.step.items()}
        params |= {"step": math.log(self.step_size), "momentum": (self.momentum / (MOMENTUM - self.momentum)) ** 0.5}
        params |= {"trust": (self.trust / (1 - self.trust)) ** 0.5}
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in params.items()}
        made, ranges = FormulaRule(tensors, client_features=tuple(self.weight), round_features=tuple(self.step)), None
        if self.ranges:
            names = (*self.weight, *self.step)
            if set(names) != set(self.ranges):
                raise InputError("the ranges of a formula are those of its ratios; give all of them, or none.")
            ranges = torch.tensor([self.ranges[name] for name in names], dtype=torch.float64).T
        return replace(made, ranges=ranges)

    def toml(self) -> str:
        """The text."""
        ranges = {name: list(limits) for name, limits in self.ranges.items()}
        tables: list[tuple[str, Mapping[str, object]]]
        tables = [("weight", self.weight), ("step", self.step), ("ranges", ranges)]
        lines = [
            "# Exponents of ratios of each client in its weight, and of the round in the step size; see formula.py."
        ]
        lines += [f"momentum = {self.momentum}", f"trust = {self.trust}", f"step_size = {self.step_size}"]
        for table, values in tables:
            lines += ["", f"[{table}]", *(f"{name} = {value}" for name, value in values.items())] if values else []
        return "\n".join(lines) + "\n"


def _parts(rule: FormulaRule) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
    return ("weight", rule.client_features), ("step", rule.round_features)


def _rounded(value: Tensor) -> float:
    return float(f"{float(value):.4g}")


def unfolded_formula() -> FormulaRule:
    """The formula that comes with fedunfold, learned by unfolding over many federations.

    >>> print(unfolded_formula())  # doctest: +ELLIPSIS
    weight of client k ∝ N_k · ...
    """
    algorithm = Algorithm(server=SERVER_OPTIMIZERS.make("grafted"), absent="remember")
    text = files("fedunfold.rules").joinpath("shipped", "formula.toml").read_text("utf-8")
    return replace(FormulaText(**tomllib.loads(text)).rule(), algorithm=algorithm)

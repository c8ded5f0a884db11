"""The methods of the evaluation: rivals with the settings they come with or with chosen ones, and the rule."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.arrays import Array, functions_of
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES, RoundFeatures
from fedunfold.rules.formula import unfolded_formula
from fedunfold.rules.parametric import Decided, ParametricRule, joined
from fedunfold.rules.pretrained import pretrained
from fedunfold.rules.rule import State, describe_rule
from fedunfold.rules.unfolded import UnfoldedRule
from fedunfold.training.methods import Method, changed, method

RULE = "rule"
FORMULA, PRIVATE = "formula", "private"
"""Other rules that come with the package, to be set beside the one that is evaluated."""
FEATURES = (*CLIENT_FEATURES, *ROUND_FEATURES)
PARTS = ("weights", "s", "β", "a")
"""What a rule decides, in the order it is named in."""
NEUTRAL = {"progress": -1.0}
"""What a feature is where it is not known; 0 for all others."""


@cache
def load_rule(name: str) -> tuple[UnfoldedRule, Algorithm]:
    """A rule and what it was learned for.

    Args:
        name: A shipped rule's name, or a rule file.

    Raises:
        InputError: There is none, or it is of another family than networks.
    """
    rule = pretrained(name)
    if type(rule) is not UnfoldedRule or rule.algorithm is None:
        raise InputError(f"{name} is no network that sees open updates; give one such as open@1.")
    return rule, rule.algorithm


@cache
def load_other(name: str) -> tuple[ParametricRule, Algorithm]:
    """`FORMULA` or `PRIVATE`, and what it was learned for."""
    rule = unfolded_formula() if name == FORMULA else pretrained(name)
    assert isinstance(rule, ParametricRule) and rule.algorithm is not None
    return rule, rule.algorithm


@dataclass(frozen=True)
class Entrant:
    """A method, in plain values.

    Attributes:
        label: What it is called in tables.
        base: A method's name, `RULE`, `FORMULA` or `PRIVATE`.
        server: Another server optimiser than the method's, described as `name:key=value,…`.
        absent: What becomes of absent clients; the rule brings its own.
        rule: The rule's file or name.
        without: A feature that the rule does not see, or parts of its decision that it does not take, joined by " ".
    """

    label: str
    base: str
    server: str | None = None
    absent: Absent = "drop"
    rule: str = ""
    without: str = ""

    @property
    def setting(self) -> str:
        """What it is run with: a record with another one is of another method."""
        if (loaded := self._loaded()) is None:
            return " ".join(filter(None, (self.base, self.server, self.absent)))
        rule, algorithm = loaded
        server = ",".join(f"{name}={value}" for name, value in algorithm.server.describe().items())
        return " ".join([str(describe_rule(rule)["parameters"])[:16], server, algorithm.absent, self.without]).strip()

    def method(self) -> Method:
        """It, ready to run; a rule is not told T yet."""
        if (loaded := self._loaded()) is None:
            return changed(method(self.base), server=self.server, absent=self.absent)
        rule, algorithm = loaded
        lacking = Ablated.of(rule, self.without) if self.without and isinstance(rule, UnfoldedRule) else rule
        return Method(self.label, algorithm, lacking)

    def _loaded(self) -> tuple[ParametricRule, Algorithm] | None:
        """The rule with parameters, where the method is one."""
        if self.base == RULE:
            return load_rule(self.rule)
        return load_other(self.base) if self.base in (FORMULA, PRIVATE) else None


@dataclass(frozen=True, eq=False)
class Ablated(UnfoldedRule):
    """A rule that lacks something.

    Attributes:
        without: A feature, which then has its neutral value whatever the round is and does not count as out of range;
            or parts of the decision, joined by " ", which are then FedAvg's.
    """

    without: str = ""

    @classmethod
    def of(cls, rule: UnfoldedRule, without: str) -> Self:
        """The rule without it."""
        if unknown := set(without.split()) - {*FEATURES, *PARTS}:
            raise InputError(f"a rule has no '{unknown.pop()}'; choose among {', '.join((*FEATURES, *PARTS))}.")
        parts = {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}
        if without in FEATURES and rule.ranges is not None:
            parts["ranges"] = rule.ranges.clone()
            parts["ranges"][:, FEATURES.index(without)] = torch.tensor([-torch.inf, torch.inf])
        return cls(**parts, without=without)

    def decide(self, found: RoundFeatures[Array], num_clients: int) -> Decided[Array]:
        decided, lacking = super().decide(self._blind(found), num_clients), self.without.split()
        weights, momentum, trust = decided.weights, decided.momentum, decided.trust
        s, functions = decided.step / (1 - momentum), functions_of(found.shares)
        if "weights" in lacking:
            weights = functions.zeros(num_clients, dtype=found.shares.dtype)
            weights[found.clients] = found.shares
        if "s" in lacking:
            s = functions.ones_like(s)
        if "β" in lacking:
            momentum = functions.zeros_like(momentum)
        if "a" in lacking:
            trust = functions.zeros_like(trust)
        return Decided(weights, s * (1 - momentum), momentum, trust)

    def _blind(self, found: RoundFeatures[Array]) -> RoundFeatures[Array]:
        if self.without not in FEATURES:
            return found
        of_clients, of_round = found.of_clients + 0.0, found.of_round + 0.0  # copies
        column, own = FEATURES.index(self.without), len(CLIENT_FEATURES)
        seen, place = (of_clients, column) if column < own else (of_round, column - own)
        seen[..., place] = NEUTRAL.get(self.without, 0.0)
        return replace(found, of_clients=of_clients, of_round=of_round)


class Noticing:
    """A rule of which every value of a feature that it reads is noted."""

    def __init__(self, rule: UnfoldedRule) -> None:
        self._rule = rule
        self.name, self.required_metrics = rule.name, rule.required_metrics
        self._met: list[Tensor] = []

    def __call__(self, report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        if len(report.entering.clients):
            self._met.append(joined(self._rule.read(report, state).bounded))
        return self._rule(report, state)

    def summary(self) -> dict[str, list[float]]:
        """Mean, 5th and 95th percentile of every feature."""
        met = torch.cat(self._met)
        found = {"mean": met.mean(0), "low": met.quantile(0.05, 0), "high": met.quantile(0.95, 0)}
        return {name: [round(value, 4) for value in values.tolist()] for name, values in found.items()}

"""The kinds of rules with parameters that can be learned."""

from typing import Literal

from fedunfold.rules.formula import FormulaRule
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.unfolded import PrivateRule, UnfoldedRule

Family = Literal["network", "private-network", "formula"]
FAMILIES: dict[Family, type[ParametricRule]] = {
    "network": UnfoldedRule,
    "private-network": PrivateRule,
    "formula": FormulaRule,
}

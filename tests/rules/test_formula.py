"""A rule as a formula: worked by hand, written and read again."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.rules.formula import FormulaRule, FormulaText
from tests.rules.test_unfolded import round_of

SMALL: dict[str, Any] = {"weight": {"size": -0.5, "redundancy": -1.0}, "step": {"spread": 0.5}, "step_size": 1.5}


def test_by_hand() -> None:
    """m = (2, 0) and (0, 2), N = 30 and 10: redundancies 3/4 and 1/4, spread 8/5.

    Θ ∝ N_k (N_k/20)^(−1/2) / redundancy_k = (30/√1.5/0.75, 10/√0.5/0.25) = 40/√1.5 and 40/√0.5;
    β = 0.18, s = 0.82 · 1.5 · √1.6.
    """
    rule = FormulaText(**SMALL, momentum=0.18).rule()
    decision, _ = rule(round_of(0, [[2, 0], [0, 2]], sizes=[30, 10], steps=[6, 2]), None)
    first, second = 40 / math.sqrt(1.5), 40 / math.sqrt(0.5)
    assert decision.weights.tolist() == pytest.approx([first / (first + second), second / (first + second)])
    assert decision.momentum == pytest.approx(0.18)
    assert decision.step == pytest.approx(0.82 * 1.5 * math.sqrt(1.6))


def test_it_starts_almost_as_fedavg() -> None:
    decision, _ = FormulaRule.initial()(round_of(0, [[1, 2], [3, 4]], [30, 10], [3, 1]), None)
    assert decision.weights.tolist() == pytest.approx([0.75, 0.25])
    assert decision.momentum == pytest.approx(0.9 * 0.01 / 1.01)


def test_powers_are_bounded() -> None:
    rule = FormulaText(weight={"size": 50.0}, step={"clients": 50.0}).rule()
    decision, _ = rule(round_of(0, [[2, 0], [0, 2]], sizes=[30, 10], steps=[6, 2]), None)
    assert decision.weights.tolist() == pytest.approx([3 * math.e**8 / (3 * math.e**8 + 1), 1 / (3 * math.e**8 + 1)])
    assert decision.step == pytest.approx(10)


def test_a_person_can_read_it() -> None:
    text = FormulaText(**SMALL, momentum=0.18).rule().readable()
    assert text.splitlines()[:2] == [
        "weight of client k ∝ N_k · (N_k / mean N)^-0.50 · (Σ_j p_j max(0, cos(m_k, m_j)))^-1.00",
        "step size s = 1.50 · (Σ p_k ‖m_k‖² / ‖Σ p_k m_k‖²)^0.50",
    ]
    assert "momentum β = 0.18" in text


def test_what_is_shipped_is_read_and_written_again() -> None:
    rule = fu.unfolded_formula()
    assert rule.ranges is not None and rule.ranges.shape == (2, len(rule.client_features) + len(rule.round_features))
    again = FormulaText.of(rule).rule()
    assert again.client_features == rule.client_features and again.round_features == rule.round_features
    for name, value in rule.params.items():
        assert float(again.params[name]) == pytest.approx(float(value), rel=1e-3), name
    assert str(rule) == rule.readable()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": {"colour": 1.0}}, "no feature 'colour' of clients; choose among size"),
        ({"step": {"turn": 1.0}}, "no power of 'turn'; choose among size"),
        ({"momentum": 0.9}, "momentum"),
        ({"step_size": 0.0}, "step_size: must be more than 0"),
        ({"weight": {"size": math.inf}}, "weight.size"),
        ({"ranges": {"size": (0.0, 1.0)}}, "give all of them, or none"),
        ({"power": 1}, "power: is not a known field"),
    ],
)
def test_what_is_no_formula(changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FormulaText(**{**SMALL, **changed}).rule()


def test_parameters_are_those_of_its_features() -> None:
    params = dict(FormulaRule.initial().params)
    del params["weight.size"]
    with pytest.raises(InputError, match=r"exactly the numbers weight\.size, .* see 'weight\.size'"):
        FormulaRule(params)
    with pytest.raises(InputError, match=r"see 'weight\.staleness'"):
        replace(FormulaRule.initial(), client_features=("size", "steps", "norm", "redundancy"))


def test_only_what_features_need_is_required() -> None:
    zero = torch.zeros((), dtype=torch.float64)
    params = {"weight.norm": zero, "step.age": zero, "step": zero, "momentum": zero, "trust": zero}
    rule = FormulaRule(params, client_features=("norm",), round_features=("age",))
    assert rule.required_metrics == {"norm"}
    assert FormulaRule.initial().required_metrics == set()

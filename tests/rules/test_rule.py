import doctest
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.parts import RoundDecision
from fedunfold.rules import Rule, WeightingRule, as_rule, dr, fedadp, fixed, rule, size, uniform
from fedunfold.rules.rule import decide
from tests.support.reports import report, weigh


def answering(answer: Any) -> Rule:
    return Rule("mine", lambda report, state: answer)


def test_weights_come_back_as_float64_on_the_cpu_with_the_state() -> None:
    weights, state = weigh(answering((torch.tensor([0.25, 0.75], requires_grad=True), "kept")), report([1, 1]), None)
    assert weights.dtype == torch.float64
    assert not weights.requires_grad
    assert weights.tolist() == [0.25, 0.75]
    assert state == "kept"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.tensor([1.0]), r"one weight for each of the 2 clients, not a tensor of shape \[1\]"),
        (torch.tensor([[0.5, 0.5]]), r"shape \[1, 2\]"),
        (torch.tensor([1.5, -0.5]), "gives 'b' the weight -0.5"),
        (torch.tensor([float("nan"), 0.5]), "gives 'a' the weight nan"),
        (torch.tensor([float("inf"), 0.5]), "gives 'a' the weight inf"),
        (torch.tensor([0.5, 0.50001]), "sum to 1.00001"),
        (None, "must return numbers"),
    ],
)
def test_weights_off_the_simplex_are_refused(weights: Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=rf"'mine' in round 4.*{message}"):
        weigh(answering((weights, None)), report([1, 1], round=4), None)


def test_a_decision_comes_back_checked() -> None:
    decision, state = answering((RoundDecision(torch.tensor([0.25, 0.75]), 2, 0), "state"))(report([1, 1]), None)
    assert isinstance(decision, RoundDecision)
    assert decision.weights.dtype == torch.float64
    assert decision.weights.tolist() == [0.25, 0.75]
    assert (decision.step, decision.momentum, state) == (2.0, 0.0, "state")
    assert isinstance(decision.step, float) and isinstance(decision.momentum, float)


def test_weights_alone_are_a_decision_for_a_plain_step() -> None:
    decision, _ = decide(uniform(), report([1, 1]), None)
    assert decision.weights.tolist() == [0.5, 0.5]
    assert (decision.step, decision.momentum) == (1.0, 0.0)
    given = RoundDecision(torch.tensor([1.0, 0.0]), 0.5, 0.9)
    assert decide(answering((given, None)), report([1, 1]), None)[0].momentum == 0.9


@pytest.mark.parametrize(
    ("weights", "step", "momentum", "message"),
    [
        (
            [0.5, 0.5],
            -0.1,
            0.0,
            "a finite step >= 0, a momentum of at least 0 and below 1 and a trust from 0 to 1, not -0.1, 0.0 and 1",
        ),
        ([0.5, 0.5], float("nan"), 0.0, "not nan, 0.0 and 1"),
        ([0.5, 0.5], float("inf"), 0.0, "not inf, 0.0 and 1"),
        ([0.5, 0.5], 1.0, 1.0, "not 1.0, 1.0 and 1"),
        ([0.5, 0.5], 1.0, -0.1, "not 1.0, -0.1 and 1"),
        ([0.5, 0.5], 1.0, float("nan"), "not 1.0, nan and 1"),
        ([0.5, 0.6], 1.0, 0.0, "sum to 1.1"),
        ([1.0], 1.0, 0.0, "one weight for each of the 2 clients"),
    ],
)
def test_decisions_out_of_range_are_refused(weights: list[float], step: float, momentum: float, message: str) -> None:
    decision = RoundDecision(torch.tensor(weights), step, momentum)
    with pytest.raises(InputError, match=rf"'mine' in round 4.*{message}"):
        answering((decision, None))(report([1, 1], round=4), None)


def test_a_trust_out_of_range_is_refused() -> None:
    for trust in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match=f"a trust from 0 to 1, not 1.0, 0.0 and {trust}"):
            answering((RoundDecision(torch.tensor([0.5, 0.5]), trust=trust), None))(report([1, 1]), None)


def test_a_scale_out_of_range_is_refused() -> None:
    for scale in (0.0, -0.5, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"'mine' in round 0 must decide on a finite scale > 0, not {scale}"):
            answering((RoundDecision(torch.tensor([0.5, 0.5]), scale=scale), None))(report([1, 1]), None)
    kept, _ = answering((RoundDecision(torch.tensor([0.5, 0.5]), scale=2), None))(report([1, 1]), None)
    assert isinstance(kept, RoundDecision) and kept.scale == 2


def test_an_answer_without_state_is_refused() -> None:
    with pytest.raises(InputError, match=r"must return \(weights, state\), not Tensor"):
        weigh(answering(torch.tensor([0.5, 0.5])), report([1, 1]), None)


def test_the_decorator_names_the_rule_and_its_metrics() -> None:
    @rule("loss", "accuracy")
    def first_only(report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
        return torch.tensor([1.0, 0.0]), (state or 0) + 1

    assert first_only.name == "first_only"
    assert first_only.required_metrics == {"loss", "accuracy"}
    _, state = weigh(first_only, report([1, 1]), None)
    weights, state = weigh(first_only, report([1, 1], round=1), state)
    assert weights.tolist() == [1.0, 0.0]
    assert state == 2


def test_a_rule_passes_through_as_it_is() -> None:
    mine = uniform()
    assert as_rule(mine) is mine


@dataclass(frozen=True)
class Object:
    """A rule that is no `Rule`."""

    name: str = "object"
    required_metrics: frozenset[Metric] = frozenset({"loss"})

    def __call__(self, report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
        return torch.tensor([1.0]), state


def test_any_object_of_the_right_shape_is_a_rule() -> None:
    mine = Object()
    assert isinstance(mine, WeightingRule)
    assert as_rule(mine) is mine
    with pytest.raises(InputError, match="'object' needs 'mood'"):
        as_rule(Object(required_metrics=frozenset({"mood"})))  # type: ignore[arg-type]


def plain_function(report: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
    return torch.tensor([0.5, 0.5]), state


@pytest.mark.parametrize("metrics", ["loss", ["loss"], frozenset({"loss"})])
def test_a_function_becomes_a_rule_with_its_metrics(metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_rule(plain_function).required_metrics == frozenset()
    monkeypatch.setattr(plain_function, "required_metrics", metrics, raising=False)
    mine = as_rule(plain_function)
    assert mine.name == "plain_function"
    assert mine.required_metrics == {"loss"}
    assert weigh(mine, report([1, 1]))[0].tolist() == [0.5, 0.5]


def test_unknown_metrics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"needs 'lose', .* loss, start_loss, accuracy, norm, gradients"):
        rule("lose")(plain_function)  # type: ignore[arg-type]
    monkeypatch.setattr(plain_function, "required_metrics", "lose", raising=False)
    with pytest.raises(InputError, match="'plain_function' needs 'lose'"):
        as_rule(plain_function)


@pytest.mark.parametrize("thing", [size, dr, fedadp, fixed, "size", 3, lambda report: report])
def test_what_is_no_rule_is_refused_before_the_first_round(thing: Any) -> None:
    with pytest.raises(InputError, match="no weighting rule"):
        as_rule(thing)


def test_a_missing_part_of_the_report_is_named() -> None:
    with pytest.raises(InputError, match="round 2 was reported without 'loss'"):
        report([1, 1], round=2).metric("loss")


@pytest.mark.parametrize("name", ["rule", "size", "uniform", "fixed", "dr", "fedadp", "fedfa"])
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"fedunfold.rules.{name}")).failed == 0

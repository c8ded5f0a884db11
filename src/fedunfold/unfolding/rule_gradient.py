"""The gradient of an outer loss in the parameters φ of a rule, through all rounds of one federation.

The adjoint gives dL/dΘ^(t), dL/ds_t, dL/dβ_t and dL/da_t (`adjoint`); from there ordinary autograd leads into φ. What
the rule read of a round counts as a constant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.federation import Federation
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import OuterLoss, RoundDecision
from fedunfold.rules.parametric import Decided, ParametricRule
from fedunfold.rules.rule import State
from fedunfold.rules.size import size_shares
from fedunfold.unfolding.adjoint import AdjointKind, unroll_decisions


@dataclass(frozen=True)
class RuleGradient:
    """One federation run forward and backward under a rule.

    Attributes:
        loss: L.
        gradient: dL/dφ by the names of φ.
        model: w^(T), [d].
    """

    loss: float
    gradient: Mapping[str, Tensor]
    model: Tensor


def rule_gradient(
    federation: Federation,
    rule: ParametricRule,
    rounds: int,
    algorithm: Algorithm,
    outer: OuterLoss,
    adjoint: AdjointKind,
    run: str,
) -> RuleGradient:
    """Run T rounds under a rule and differentiate the outer loss with respect to φ.

    Args:
        federation: Who trains.
        rule: The rule.
        rounds: T.
        algorithm: How clients and server train.
        outer: The outer loss.
        adjoint: Whether local training is differentiated exactly or to first order.
        run: Names the randomness, that of the initial model too.

    Returns:
        The outer loss and its gradient.
    """
    params = {name: value.detach().requires_grad_() for name, value in rule.params.items()}
    learned = replace(rule, params=params)
    decisions: dict[int, Decided[Tensor]] = {}

    def decide(report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        if not len(report.entering.clients):
            return RoundDecision(size_shares(report)), state
        found = learned.read(report, state)
        with torch.enable_grad():
            decided = decisions[report.round] = learned.decide(found, len(report.client_ids))
        return learned.settled(decided, found)

    (result,) = unroll_decisions(
        *(federation, decide, rounds, algorithm, outer, adjoint),
        runs=[run],
        models=[federation.initial_model(run)],
        required_metrics=rule.required_metrics,
    )
    outputs: list[Tensor] = []
    slopes: list[Tensor] = []
    for t, decided in decisions.items():
        outputs += [decided.weights, decided.step, decided.momentum, decided.trust]
        own = algorithm.step_size(t) * result.step_gradient[t]
        slopes += [result.gradient[t], own, result.momentum_gradient[t], result.trust_gradient[t]]
    slopes = [slope.to(output) for slope, output in zip(slopes, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(params.values()), slopes, materialize_grads=True)
    return RuleGradient(result.loss, dict(zip(params, found, strict=True)), result.model)

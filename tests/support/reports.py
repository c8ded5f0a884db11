"""Round reports for tests, with only the fields a weighting rule looks at; one round of a rule, and of the server."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedunfold.aggregation.server_round import Aggregated, ServerState, aggregate
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.messages import ClientMetrics, ClientUpdates, OpenUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules import WeightingRule


def report(
    num_examples: Sequence[int],
    *,
    round: int = 0,
    client_ids: Sequence[str] | None = None,
    participated: Sequence[bool] | None = None,
    cohort: Sequence[bool] | None = None,
    updates: Sequence[Sequence[float]] | Tensor | None = None,
    loss: Sequence[float] | None = None,
    start_loss: Sequence[float] | None = None,
    accuracy: Sequence[float] | None = None,
    norm: Sequence[float] | None = None,
    gradients: Sequence[Sequence[float]] | Tensor | None = None,
    num_steps: Sequence[int] | None = None,
    label_counts: Sequence[Sequence[int]] | Tensor | None = None,
    lr: float | None = None,
    model: Sequence[float] | Tensor | None = None,
) -> ClientUpdates:
    """All clients of the cohort participate unless said otherwise, named a, b, c, …; `updates` and `gradients` have
    rows for those that do."""
    sampled = torch.tensor([True] * len(num_examples) if cohort is None else list(cohort))
    here = sampled if participated is None else torch.tensor(list(participated))
    rows = torch.zeros(int(here.sum()), 2) if updates is None else torch.as_tensor(updates)
    return ClientUpdates(
        round=round,
        client_ids=tuple(client_ids or "abcdefgh"[: len(num_examples)]),
        num_examples=torch.tensor(num_examples),
        participated=here,
        num_steps=here.long() if num_steps is None else torch.tensor(num_steps),
        updates=OpenUpdates(here.nonzero().flatten(), rows),
        cohort=sampled,
        metrics=ClientMetrics(
            loss=None if loss is None else torch.tensor(loss),
            start_loss=None if start_loss is None else torch.tensor(start_loss),
            accuracy=None if accuracy is None else torch.tensor(accuracy),
            norm=None if norm is None else torch.tensor(norm),
            gradients=None if gradients is None else torch.as_tensor(gradients),
        ),
        label_counts=None if label_counts is None else torch.as_tensor(label_counts),
        lr=lr,
        model=None if model is None else torch.as_tensor(model),
    )


def weigh(rule: WeightingRule, updates: ClientUpdates, state: Any = None) -> tuple[Tensor, Any]:
    """Θ of a rule that decides on nothing else, and its next state."""
    weights, state = rule(updates, state)
    assert isinstance(weights, Tensor)
    return weights, state


def aggregate_one(
    server: ServerState, updates: ClientUpdates, weights: Tensor | RoundDecision, algorithm: Algorithm
) -> tuple[ServerState, Aggregated]:
    """The server's part of a round of one run."""
    decision = weights if isinstance(weights, RoundDecision) else RoundDecision(weights)
    (done,) = aggregate([server], [updates], [decision], algorithm)
    return done

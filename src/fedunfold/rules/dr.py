"""Dynamic reweighting: the worse a client fares, the more it counts."""

import math
from typing import Literal

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares


@RULES.register("dr")
def dr(q: float = 1.0, *, loss: Literal["path", "start"] = "path") -> Rule:
    """Weigh clients by size and loss.

        Θ_k ∝ (N_k/N) · F_k^(q+1)

    For federations in which a minority of clients would otherwise be left behind.

    Args:
        q: q ≥ 0; a larger one presses harder on the worst.
        loss: F_k: with "path" the sum of the minibatch losses that client k met during its local epochs, so that one
            that makes more steps counts for more; with "start" its mean loss on all of its data at w^(t).

    A client that reported no loss this round counts with its last one, or, before its first, with the mean
    of the known ones. Where no loss is known, or all are 0, the weights are N_k/N.

    Reference: Zhao and Joshi 2022, A Dynamic Reweighting Strategy for Fair Federated Learning.

    >>> from fedunfold.core.messages import ClientMetrics
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([10, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([1, 1]),
    ...     metrics=ClientMetrics(loss=torch.tensor([1.0, 3.0])))
    >>> weights, _ = dr(q=1)(report, None)
    >>> [round(weight, 6) for weight in weights.tolist()]
    [0.1, 0.9]
    """
    if not 0 <= q < math.inf:
        raise InputError(f"dr needs a finite q >= 0, not {q}.")
    if loss not in ("path", "start"):
        raise InputError(f"dr knows the losses 'path' and 'start', not '{loss}'.")
    metric: Metric = "loss" if loss == "path" else "start_loss"

    def weigh(report: ClientUpdates, last: State) -> tuple[Tensor, State]:
        now = report.metric(metric).tolist()
        known = {**(last or {}), **{k: f for k, f in zip(report.client_ids, now, strict=True) if not math.isnan(f)}}
        if not known:
            return size_shares(report), known
        typical = sum(known.values()) / len(known)
        losses = torch.tensor([known.get(key, typical) for key in report.client_ids], dtype=torch.float64)
        # In logarithms, because F^(q+1) leaves the range of floats for a large q.
        scores = size_shares(report).log() + (q + 1) * losses.log()
        if (scores == -math.inf).all():
            return size_shares(report), known
        return scores.softmax(0), known

    name = "dr" if (q, loss) == (1, "path") else f"dr(q={q:g}, loss={loss})"
    return Rule(name, weigh, frozenset({metric}), numbers_only=True)

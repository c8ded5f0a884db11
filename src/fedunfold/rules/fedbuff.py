"""Weights by how stale updates are, for asynchronous rounds."""

import math

import torch

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares


@RULES.register("fedbuff")
def fedbuff(a: float = 0.5, *, by: str = "count") -> Rule:
    """Discount updates by their staleness, the number of steps that the server has made since their clients began.

        v_k = p_k (1 + s_k)^−a  of the updates in the buffer, else 0
        S = Σ_k v_k,   Θ_k = v_k / S

    The direction S Σ_k Θ_k Δ_k = Σ_k v_k Δ_k is not normalised: what is stale moves the model less. With a = ½ the
    discount is FedBuff's, 1/√(1 + s); any other a is FedAsync's polynomial one, and a = 0 its constant one, none. In
    synchronous rounds no update is stale, and with `by="size"` it is FedAvg.

    Args:
        a: The exponent; 0 for no discount.
        by: What p_k is: "count", 1 over the number of updates as in FedBuff, or "size", N_k over that of their sum.

    For asynchronous rounds in which some updates come from models of many steps before. Fast clients have more updates
    in the buffers than slow ones and so count more, whatever the discount; a larger a makes that worse.

    Reference: Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation; Xie et al. 2019,
    Asynchronous Federated Optimization.

    >>> report = ClientUpdates(
    ...     round=3, client_ids=("ann", "bob", "cleo"), num_examples=torch.tensor([30, 10, 10]),
    ...     participated=torch.tensor([True, True, False]), num_steps=torch.tensor([3, 1, 0]),
    ...     cohort=torch.tensor([True, True, False]), staleness=torch.tensor([0, 3, 0]))
    >>> decision, _ = fedbuff()(report, None)  # v = 1/2, 1/2 · 1/√4
    >>> [round(weight, 3) for weight in decision.weights.tolist()], decision.step
    ([0.667, 0.333, 0.0], 0.75)
    """
    if not 0 <= a < math.inf:
        raise InputError(f"the exponent a of fedbuff must be a finite number >= 0, not {a!r}.")
    if by not in ("count", "size"):
        raise InputError(f"fedbuff counts updates by 'count' or by 'size', not by {by!r}.")

    def weigh(report: ClientUpdates, state: State) -> tuple[torch.Tensor | RoundDecision, State]:
        inside = report.participated.cpu()
        if not bool(inside.any()):
            return size_shares(report), state
        shares = torch.where(inside, size_shares(report) if by == "size" else 1.0, 0.0).double()
        stale = torch.zeros_like(shares) if report.staleness is None else report.staleness.double().cpu()
        values = shares / shares.sum() * (1 + stale) ** -a
        return RoundDecision(values / values.sum(), float(values.sum())), state

    return Rule("fedbuff" if (a, by) == (0.5, "count") else f"fedbuff(a={a:g}, by={by})", weigh)

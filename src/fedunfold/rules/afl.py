"""Agnostic federated learning: weights that climb towards the clients with the highest loss."""

import math

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares


@RULES.register("afl")
def afl(gamma: float = 0.1) -> Rule:
    """Weigh clients by a mixture λ that climbs their losses: the model is trained for the worst mixture of clients.

        λ ← Π(λ + γ F)          F_k = client k's mean loss at w^(t), 0 for those who did not participate
        Θ_k ∝ λ_k               over the clients that enter the round

    from λ_k = 1/K. Π is the Euclidean projection on the simplex, which sets the λ of clients that fare well to exactly
    0. For federations that must serve every client, of which few have most of the data; sample sizes play no part.

    λ is updated before it weighs, so that clients that are sampled seldom have a say in the rounds they come in; the
    paper makes both steps at once, so that its λ is that of the round before. A client that turns up later starts at
    1/K. Absent clients have no weight in a round, so that `keep` and `drop` come to the same; clients that all have
    λ = 0, which takes losses of 0, count by size.

    Args:
        gamma: γ ≥ 0; the default is ours, and a loss of 1 moves λ by up to 0.1 with it.

    Reference: Mohri, Sivek and Suresh 2019, Agnostic Federated Learning.

    From λ = (1/2, 1/2): λ + γF = (0.6, 0.8), and 0.2 is taken from both.

    >>> from fedunfold.core.messages import ClientMetrics, OpenUpdates
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([10, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([1, 1]),
    ...     updates=OpenUpdates(torch.tensor([0, 1]), torch.zeros(2, 3)),
    ...     metrics=ClientMetrics(start_loss=torch.tensor([1.0, 3.0])))
    >>> [round(weight, 6) for weight in afl(gamma=0.1)(report, None)[0].tolist()]
    [0.4, 0.6]
    """
    if not 0 <= gamma < math.inf:
        raise InputError(f"afl needs a finite gamma >= 0, not {gamma}.")

    def weigh(report: ClientUpdates, mixture: State) -> tuple[Tensor, State]:
        known = dict(mixture or {})  # client id -> λ_k
        names = list(dict.fromkeys([*known, *report.client_ids]))
        losses = report.metric("start_loss").cpu().double()
        losses = torch.where(report.participated.cpu().bool(), losses, 0.0).nan_to_num(0.0)
        heard = dict(zip(report.client_ids, losses.tolist(), strict=True))
        climbed = [known.get(name, 1 / len(names)) + gamma * heard.get(name, 0.0) for name in names]
        projected = project_to_simplex(torch.tensor(climbed, dtype=torch.float64))
        after = dict(zip(names, projected.tolist(), strict=True))
        clients = report.entering.clients.cpu()
        if not len(clients):
            return size_shares(report), after
        scores = torch.tensor([after[report.client_ids[k]] for k in clients.tolist()], dtype=torch.float64)
        if not scores.sum() > 0:
            scores = report.num_examples.cpu().double()[clients]
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[clients] = scores / scores.sum()
        return weights, after

    return Rule("afl" if gamma == 0.1 else f"afl(gamma={gamma:g})", weigh, frozenset({"start_loss"}))


def project_to_simplex(v: Tensor) -> Tensor:
    """The point of the simplex nearest to v [K]: max(0, v_k − τ) with the τ that makes the sum 1.

    With v sorted downwards, τ = (v_1 + … + v_r − 1)/r for the largest r at which v_r > τ.

    Reference: Held, Wolfe and Crowder 1974; Duchi et al. 2008.

    >>> project_to_simplex(torch.tensor([0.75, 1.0, -1.0])).tolist()
    [0.375, 0.625, 0.0]
    """
    shifted = v - v.max()  # changes nothing, but 1 would vanish beside large numbers
    ordered = shifted.sort(descending=True).values
    candidates = (ordered.cumsum(0) - 1) / torch.arange(1, len(v) + 1, device=v.device)
    tau = candidates[(ordered > candidates).nonzero().max()]
    return (shifted - tau).clamp(min=0)

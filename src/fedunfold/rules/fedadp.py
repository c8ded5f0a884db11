"""FedAdp: clients that pull with the others count more."""

import math

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares


@RULES.register("fedadp")
def fedadp(beta: float = 7.0) -> Rule:
    """Weigh the participating clients by size and by how well their gradients agree with the average one.

        g    = Σ_l (N_l/N) g_l                       g_l the sum of client l's local gradients
        φ_k  = arccos(⟨g, g_k⟩ / (‖g‖ ‖g_k‖))        π/2 where one of them is 0
        φ̃_k  = mean of φ_k over the rounds in which client k participated
        Θ_k  ∝ N_k · exp(h(φ̃_k)),   h(φ) = β (1 − exp(−exp(−β (φ − 1))))

    h falls from β for aligned gradients to 0 for opposed ones, steepest at φ = 1. For federations in which a majority
    agrees on a direction and some clients with odd data disturb it; the odd ones lose their say. Absent clients get
    weight 0; where nobody participates the weights are N_k/N, which then multiply nothing.

    Only participating clients get weight, so that `keep`, `drop` and `remember` come to the same.

    Args:
        beta: β > 0; the larger, the more abruptly h falls.

    Reference: Wu and Wang 2021, Fast-Convergent Federated Learning With Adaptive Weighting.

    Three clients pull one way, one the other:

    >>> from fedunfold.core.messages import ClientMetrics
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("a", "b", "c", "d"), num_examples=torch.full((4,), 10),
    ...     participated=torch.ones(4).bool(), num_steps=torch.ones(4),
    ...     metrics=ClientMetrics(gradients=torch.tensor([[1.0], [1.0], [1.0], [-1.0]])))
    >>> [round(weight, 3) for weight in fedadp()(report, None)[0].tolist()]
    [0.333, 0.333, 0.333, 0.0]
    """
    if not 0 < beta < math.inf:
        raise InputError(f"fedadp needs a finite beta > 0, not {beta}.")

    def weigh(report: ClientUpdates, seen: State) -> tuple[Tensor, State]:
        seen = dict(seen or {})  # client id -> (rounds participated in, mean angle over them)
        participated = report.participated.cpu().bool()
        shares = size_shares(report)
        if not participated.any():
            return shares, seen
        keys = [key for key, here in zip(report.client_ids, participated.tolist(), strict=True) if here]
        for key, angle in zip(keys, _angles(report.metric("gradients"), shares[participated]), strict=True):
            rounds, mean = seen.get(key, (0, 0.0))
            seen[key] = (rounds + 1, mean + (angle - mean) / (rounds + 1))
        angles = torch.tensor([seen[key][1] for key in keys], dtype=torch.float64)
        weights = torch.zeros_like(shares)
        weights[participated] = (shares[participated].log() + _gompertz(angles, beta)).softmax(0)
        return weights, seen

    name = "fedadp" if beta == 7 else f"fedadp(beta={beta:g})"
    return Rule(name, weigh, frozenset({"gradients"}))


def _angles(gradients: Tensor, shares: Tensor) -> list[float]:
    """φ_k for gradients [P, d], which stay on their device; only P numbers leave it."""
    shares = shares.to(gradients)
    lengths = gradients.norm(dim=1)
    average = shares @ gradients
    size = average.norm()
    # What rounding leaves of gradients that cancel has no direction; it would change with their order.
    rounding = len(lengths) * torch.finfo(gradients.dtype).eps * (shares @ lengths)
    # Of length 1, so that its product with a small gradient does not vanish in float32.
    direction = torch.where(size > rounding, average / size, 0.0)
    along, lengths = torch.stack([gradients @ direction, lengths]).cpu().to(torch.float64)
    cosines = torch.where(lengths == 0, 0.0, along / lengths)
    angles: list[float] = cosines.clamp(-1, 1).arccos().tolist()
    return angles


def _gompertz(angles: Tensor, beta: float) -> Tensor:
    """h(φ); expm1 keeps the digits of the small values at large angles."""
    return -beta * torch.expm1(-torch.exp(-beta * (angles - 1)))

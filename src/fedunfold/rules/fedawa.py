"""FedAWA: weights that pull together clients whose updates point the way of the mean."""

import math

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's usual ones


@RULES.register("fedawa")
def fedawa(lr: float = 0.01) -> Rule:
    """Weigh clients by a softmax that one step of Adam a round adapts to their updates.

        Θ = softmax(T) over the clients that enter the round,         T ← T − Adam(dL/dT) before it weighs
        L(T) = Σ_k Θ_k (1 − cos(w, w_k)) + Σ_k Θ_k ‖Δ_k − Σ_j Θ_j Δ_j‖

    with w = w^(t) and Δ_k = w_k − w. The first term favours models that point where the last one did, the second
    updates that lie near the weighted mean. For federations in which a few clients with odd data disturb the others; no
    data at the server. It needs single updates, so that it does not work with secure sums.

    T_k starts at log N_k, which makes size weights, and is kept with Adam's moments by client id; a client that does
    not enter a round keeps them as they are. Where nobody does the weights are N_k/N.

    Args:
        lr: Adam's learning rate, lr ≥ 0; T_k moves by about so much a round. The default is ours; 0 keeps size weights.

    Reference: Shi et al. 2025, FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client
    Vectors.

    Two clients agree, and one is odd:

    >>> from fedunfold.core.messages import OpenUpdates
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("a", "b", "c"), num_examples=torch.full((3,), 10), participated=torch.ones(3).bool(),
    ...     num_steps=torch.ones(3), model=torch.ones(2),
    ...     updates=OpenUpdates(torch.arange(3), torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])))
    >>> [round(weight, 3) for weight in fedawa(lr=0.5)(report, None)[0].tolist()]
    [0.422, 0.422, 0.155]
    """
    if not 0 <= lr < math.inf:
        raise InputError(f"fedawa needs a finite lr >= 0, not {lr}.")

    def weigh(report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        known: dict[str, list[float]] = dict(state or {})  # client id -> (T_k, Adam's moments, steps made)
        clients = report.entering.clients.cpu()
        if not len(clients):
            return size_shares(report), known
        if report.model is None:
            raise InputError(
                f"round {report.round}: rule 'fedawa' compares models with w^(t), which is not known here; "
                "choose another rule."
            )
        names = [report.client_ids[k] for k in clients.tolist()]
        starts = report.num_examples.cpu().double()[clients].log().tolist()
        now = [known.get(name, [start, 0.0, 0.0, 0.0]) for name, start in zip(names, starts, strict=True)]
        logits, first, second, steps = torch.tensor(now, dtype=torch.float64).T
        rows, model = report.layout.params(report.entering.rows), report.layout.params(report.model)
        slopes = loss_gradient(logits, *geometry(rows, model))
        steps = steps + 1
        first, second = BETA1 * first + (1 - BETA1) * slopes, BETA2 * second + (1 - BETA2) * slopes.square()
        scale = (second / (1 - BETA2**steps)).sqrt() + EPSILON
        logits = logits - lr * first / (1 - BETA1**steps) / scale
        known |= dict(zip(names, torch.stack([logits, first, second, steps], 1).tolist(), strict=True))
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[clients] = logits.softmax(0)
        return weights, known

    return Rule("fedawa" if lr == 0.01 else f"fedawa(lr={lr:g})", weigh)


def loss_gradient(logits: Tensor, turns: Tensor, products: Tensor) -> Tensor:
    """dL/dT from T [n], 1 − cos(w, w_k) [n] and ⟨Δ_j, Δ_k⟩ [n, n].

    With d_k = ‖Δ_k − Σ_j Θ_j Δ_j‖, d_k² = G_kk − 2 (GΘ)_k + ΘᵀGΘ and so ∂d_k/∂Θ_i = ((GΘ)_i − G_ik)/d_k, which counts
    as 0 where d_k is. Through the softmax, dL/dT_i = Θ_i (g_i − Σ_j Θ_j g_j) with g = dL/dΘ.
    """
    theta = logits.softmax(0)
    to_mean, squares = products @ theta, products.diagonal()
    distances = squares - 2 * to_mean + theta @ to_mean
    # What rounding leaves of equal updates is no distance: divided by it, noise would become a slope.
    rounding = 8 * len(theta) * torch.finfo(torch.float64).eps * squares.max()
    distances = torch.where(distances > rounding, distances, 0.0).sqrt()
    pull = torch.where(distances > 0, theta / distances, 0.0)
    slopes = turns + distances + pull.sum() * to_mean - products @ pull
    return theta * (slopes - theta @ slopes)


def geometry(updates: Tensor, model: Tensor) -> tuple[Tensor, Tensor]:
    """1 − cos(w, w_k) [n] and ⟨Δ_j, Δ_k⟩ [n, n]; only these leave the device.

    With r = ‖w‖ and s = ‖w_k‖, 1 − cos = (‖Δ_k‖² − (s − r)²)/(2 r s), which keeps its digits where the two nearly
    agree. A model of zeros has the cosine 0 with every other.
    """
    products, along = (updates @ updates.T).cpu().double(), (updates @ model.to(updates)).cpu().double()
    squares, r = products.diagonal(), float(model.double().norm())
    longer = 2 * along + squares  # s² − r²
    s = (r * r + longer).clamp(min=0).sqrt()
    apart = squares - (longer / (s + r).clamp(min=torch.finfo(torch.float64).tiny)).square()
    both = 2 * r * s
    return torch.where(both > 0, apart / torch.where(both > 0, both, 1.0), 1.0), products

"""FedDisco: clients count by size, and the less the farther their labels are from balanced."""

import math
from typing import Literal

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

ROUNDING = 1e-12  # what is left of the divergence of balanced labels, which would become that of one client


@RULES.register("feddisco")
def feddisco(a: float = 0.5, b: float = 0.1, *, distance: Literal["kl", "l2"] = "kl") -> Rule:
    """Weigh clients by size, less their discrepancy: how far their labels are from balanced.

        Θ_k ∝ max(0, p_k − a d_k + b)         over the n clients that enter the round, p_k = N_k/ΣN over these

    with the distance of client k's distribution of labels D_k to the uniform one U over the C classes

        kl:  d_k = KL(D_k ‖ U) / Σ_l KL(D_l ‖ U),  KL(D ‖ U) = Σ_y D(y) log(C D(y));   0 where all are 0
        l2:  d_k = ‖D_k − U‖

    For skewed labels: the update of a client that holds a few classes only pulls the model towards these. It needs the
    clients' label counts. Where no score is positive the weights are p_k, as without a discrepancy.

    Absent clients have no weight, so that `keep` and `drop` come to the same.

    Args:
        a: a ≥ 0, how much the discrepancy counts.
        b: b, which keeps clients in: the larger, the more alike the weights.
        distance: "kl" or "l2".

    Reference: Ye et al. 2023, FedDisco: Federated Learning with Discrepancy-Aware Collaboration. That the divergences
    are divided by their sum is what the published code does; without it p_k − a d_k + b is seldom positive.

    One client holds both classes, the other only one; p = (1/2, 1/2), d = (0, 1):

    >>> from fedunfold.core.messages import OpenUpdates
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([10, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([1, 1]),
    ...     updates=OpenUpdates(torch.tensor([0, 1]), torch.zeros(2, 3)), label_counts=torch.tensor([[5, 5], [10, 0]]))
    >>> [round(weight, 3) for weight in feddisco()(report, None)[0].tolist()]  # 0.6 : 0.1
    [0.857, 0.143]
    """
    if not (0 <= a < math.inf and math.isfinite(b)):
        raise InputError(f"feddisco needs a finite a >= 0 and a finite b, not {a} and {b}.")
    if distance not in ("kl", "l2"):
        raise InputError(f"feddisco knows the distances 'kl' and 'l2', not '{distance}'.")

    def weigh(report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        counts = report.label_counts
        if counts is None or counts.shape[1] < 2:
            raise InputError(
                f"round {report.round}: rule 'feddisco' needs the label counts of every client, which are not known "
                "here; train on classes that clients count when they register, or choose another rule."
            )
        clients = report.entering.clients.cpu()
        if not len(clients):
            return size_shares(report), state
        sizes = report.num_examples.cpu().double()[clients]
        p = sizes / sizes.sum()
        scores = (p - a * _discrepancies(counts[clients], distance) + b).clamp(min=0)
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[clients] = scores / scores.sum() if scores.sum() > 0 else p
        return weights, state

    name = "feddisco" if (a, b, distance) == (0.5, 0.1, "kl") else f"feddisco(a={a:g}, b={b:g}, distance={distance})"
    return Rule(name, weigh, uses=frozenset({"label counts"}))


def _discrepancies(counts: Tensor, distance: str) -> Tensor:
    """d_k for label counts [n, C]."""
    classes = counts.shape[1]
    labels = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    if distance == "l2":
        found: Tensor = (labels - 1 / classes).norm(dim=1)
    else:
        divergences = torch.special.xlogy(labels, classes * labels).sum(1)
        divergences = torch.where(divergences > ROUNDING, divergences, 0.0)
        found = divergences / divergences.sum().clamp(min=ROUNDING)
    return found

"""FedFa: weights by training accuracy and frequency of participation."""

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

ZERO_ARGUMENT = 1e-6  # stands for an argument 0 of the logarithm


@RULES.register("fedfa")
def fedfa(gamma: float = 0.5) -> Rule:
    """Weigh the participating clients by the information in their accuracy and in their participation.

        Θ_k = γ M̄_k + (1−γ) Ē_k
        M̄_k ∝ −log₂(L_k / Σ_l L_l)         L_k the accuracy of w_k on client k's training data
        Ē_k ∝ −log₂(1 − F_k / Σ_l F_l)     F_k the rounds client k took part in, this one included

    Sums and normalisation run over the participating clients; an argument 0 of the logarithm becomes 10⁻⁶, and
    Σ L = 0 makes M̄ uniform. One participating client gets weight 1, absent ones 0; where nobody participates the
    weights are N_k/N, which then multiply nothing.

    For federations whose clients come and go: those that come often count more, and so do those that still
    fit their own data badly. (FedFa's text says that accurate clients gain; its formula, which is this one,
    favours inaccurate ones.) Sample sizes play no part.

    Only participating clients get weight, so that `keep`, `drop` and `remember` come to the same.

    Args:
        gamma: γ, 0 ≤ γ ≤ 1, how much accuracy counts beside participation.

    Reference: Huang et al. 2020, Fairness and Accuracy in Federated Learning.

    >>> from fedunfold.core.messages import ClientMetrics
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([30, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([3, 1]),
    ...     metrics=ClientMetrics(accuracy=torch.tensor([0.9, 0.3])))
    >>> [round(weight, 3) for weight in fedfa()(report, None)[0].tolist()]
    [0.336, 0.664]
    """
    if not 0 <= gamma <= 1:
        raise InputError(f"fedfa needs 0 <= gamma <= 1, not {gamma}.")

    def weigh(report: ClientUpdates, rounds: State) -> tuple[Tensor, State]:
        rounds = dict(rounds or {})  # client id -> rounds it took part in
        participated = report.participated.cpu().bool()
        if not participated.any():
            return size_shares(report), rounds
        keys = [key for key, here in zip(report.client_ids, participated.tolist(), strict=True) if here]
        for key in keys:
            rounds[key] = rounds.get(key, 0) + 1
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        if len(keys) == 1:
            weights[participated] = 1.0
            return weights, rounds
        accuracy = report.metric("accuracy").cpu().to(torch.float64)[participated]
        often = torch.tensor([rounds[key] for key in keys], dtype=torch.float64)
        if accuracy.sum() == 0:
            by_accuracy = torch.full_like(accuracy, 1 / len(keys))
        else:
            by_accuracy = _normalised_information(accuracy / accuracy.sum())
        by_presence = _normalised_information(1 - often / often.sum())
        weights[participated] = gamma * by_accuracy + (1 - gamma) * by_presence
        return weights, rounds

    name = "fedfa" if gamma == 0.5 else f"fedfa(gamma={gamma:g})"
    return Rule(name, weigh, frozenset({"accuracy"}), numbers_only=True)


def _normalised_information(fractions: Tensor) -> Tensor:
    """−log₂ of each fraction, scaled to sum 1."""
    information = -torch.where(fractions == 0, ZERO_ARGUMENT, fractions).log2()
    return information / information.sum()

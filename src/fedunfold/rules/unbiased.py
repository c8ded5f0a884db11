"""Weights that make up for how the cohort was sampled."""

import torch

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares


@RULES.register("unbiased")
def unbiased() -> Rule:
    """Weigh the clients of the cohort by size over the probability of being in it.

        v_k = p_k / π_k  for k in the cohort, else 0        p_k = N_k / N over all K clients
        s = Σ_k v_k,   Θ_k = v_k / s

    π_k is the probability with which the client sampler names client k. The direction s Σ_k Θ_k Δ_k = Σ_k v_k Δ_k is
    then right in expectation: it is Σ_k p_k Δ_k over all clients (Horvitz and Thompson 1952). Θ has to sum to 1, so the
    sum of the v_k is the step size s. Where everybody is in the cohort it is `size`.

    For samplers with unequal probabilities, where size weights over the cohort favour those who are sampled often. With
    the sampler by-size s = 1, and all count the same but those that are in every cohort. With uniform s varies from
    round to round; size weights over the cohort are then biased a little and vary less. Samplers without probabilities
    are refused.

    Reference: Horvitz and Thompson 1952, A Generalization of Sampling Without Replacement from a Finite Universe.

    >>> import numpy as np
    >>> from fedunfold.core.parts import KnownClients, Selection
    >>> from fedunfold.selection import BySize
    >>> selection = Selection(BySize(), KnownClients(0, ("ann", "bob", "cleo"), np.array([10, 30, 60])), count=2)
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob", "cleo"), num_examples=torch.tensor([10, 30, 60]),
    ...     participated=torch.tensor([False, True, True]), num_steps=torch.tensor([0, 3, 6]),
    ...     cohort=torch.tensor([False, True, True]), selection=selection)
    >>> decision, _ = unbiased()(report, None)  # π = 1/4, 3/4, 1, so v = 0, 0.3/0.75, 0.6/1
    >>> [round(weight, 3) for weight in decision.weights.tolist()], round(decision.step, 3)
    ([0.0, 0.4, 0.6], 1.0)
    """

    def weigh(report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        where, selection = f"weighting rule 'unbiased' in round {report.round}", report.selection
        if selection is None:
            raise InputError(
                f"{where} needs to know how the cohort was sampled, which only a federation does that samples by a "
                "client sampler; take the rule size here."
            )
        if (inclusion := selection.inclusion) is None:
            raise InputError(
                f"{where} needs the probabilities of being sampled, which client sampler '{selection.sampler.name}' "
                "does not have; choose uniform, by-size or importance, or another rule."
            )
        values = torch.where(report.cohort.cpu(), size_shares(report) / torch.from_numpy(inclusion), 0.0)
        step = values.sum()
        return RoundDecision(values / step, float(step)), state

    return Rule("unbiased", weigh)

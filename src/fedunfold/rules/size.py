"""Weights by the number of samples."""

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule


@RULES.register("size")
def size() -> Rule:
    """Weigh every client by its share of the samples.

        Θ_k = N_k / N

    The usual choice, and the right one where clients hold like data, train equally long and are rarely
    absent: the average then follows the gradient of the loss over all samples.

    Reference: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized
    Data.

    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([30, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([3, 1]))
    >>> size()(report, None)[0].tolist()
    [0.75, 0.25]
    """
    return Rule("size", lambda report, state: (size_shares(report), state), numbers_only=True)


def size_shares(report: ClientUpdates) -> Tensor:
    """N_k/N over all clients, participating or not, in float64 whatever the report came in."""
    sizes = report.num_examples.cpu().to(torch.float64)
    return sizes / sizes.sum()

"""Equal weights."""

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import RULES, Rule, State


@RULES.register("uniform")
def uniform() -> Rule:
    """Weigh all clients alike.

        Θ_k = 1 / K

    For federations in which every participant should have the same say however much data it holds; with
    sizes far apart, the samples of small clients then count for more than those of large ones.

    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([30, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([3, 1]))
    >>> uniform()(report, None)[0].tolist()
    [0.5, 0.5]
    """

    def weigh(report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        clients = len(report.client_ids)
        return torch.full((clients,), 1 / clients, dtype=torch.float64), state

    return Rule("uniform", weigh, numbers_only=True)

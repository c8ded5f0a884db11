"""How the server puts a round together when some clients are away.

With updates Δ_k = w_k − w^(t) and weights Θ on the simplex over all K clients, the round's direction is
u = Σ_k α_k m_k, where

| absent   | m_k                                             | α_k                                   |
|----------|-------------------------------------------------|---------------------------------------|
| keep     | Δ_k if present, else 0 (its unchanged w^(t))      | Θ_k                                   |
| drop     | Δ_k over the present clients                    | Θ_k / Σ_present Θ (none present: no step) |
| remember | Δ_k if present, else its last one (0 before any) | Θ_k                                   |

`keep` is the paper's, `drop` what a real server does, `remember` is MIFA (Gu et al. 2021).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.federation import ClientUpdates, HiddenSum, SecureUpdates

Absent = Literal["keep", "drop", "remember"]


def check_absent(absent: str) -> Absent:
    """It, where it is one of the three; anything else is refused."""
    if absent not in get_args(Absent):
        raise InputError(f"unknown way to treat absent clients '{absent}'; choose keep, drop or remember.")
    return cast(Absent, absent)


@dataclass(frozen=True)
class Contributions:
    """Who enters a round's direction, with what: `clients[n]` are indices into the K clients.

    Under `remember` the updates stay with the memory and are put side by side only when asked for, so that
    keeping a contribution for later costs no second copy.
    """

    clients: Tensor
    fresh: Tensor
    memory: Mapping[int, Tensor] = field(default_factory=dict)

    def updates(self) -> Tensor:
        """m_k, [n, d]."""
        return torch.stack(list(self.memory.values())) if self.memory else self.fresh

    def along(self, vector: Tensor) -> Tensor:
        """⟨v, m_k⟩, [n]."""
        return self.updates() @ vector


def contributions(report: ClientUpdates, absent: Absent, memory: Mapping[int, Tensor]) -> Contributions:
    """The table's m_k. `memory` is the server's, and comes back with this round's updates in it."""
    present = torch.nonzero(report.present).flatten()
    if absent != "remember":
        return Contributions(present, report.updates)
    # Rows of their own: a view would keep all updates of its round alive.
    latest = {int(k): update.clone() for k, update in zip(present, report.updates, strict=True)}
    for update in latest.values():
        update[len(update) - report.statistics :] = 0  # added again and again, a change of a variance makes it negative
    memory = dict(sorted({**memory, **latest}.items()))
    return Contributions(torch.tensor(list(memory), dtype=torch.long), report.updates, memory)


def coefficients(weights: Tensor, present: Tensor, absent: Absent) -> Tensor:
    """The table's α_k from Θ [..., K], differentiable in Θ; all 0 where no present client has any weight."""
    if absent != "drop":
        return weights
    there = torch.where(present, weights, 0.0)
    total = there.sum(-1, keepdim=True)
    return there / torch.where(total > 0, total, 1.0)


def hidden_direction(hidden: SecureUpdates, weights: Tensor, absent: Absent) -> tuple[HiddenSum, Tensor]:
    """The sum Σ_k Θ_k Δ_k over those who entered it, and u: under `drop` they share the weight of those who did not.

    There is no `remember` here: it would need single updates.
    """
    found = hidden.weighted_sum(weights)
    total = weights[found.clients].sum()
    return found, found.total / total.to(found.total) if absent == "drop" and bool(total > 0) else found.total


def makes_step(present: Tensor, absent: Absent) -> bool:
    """Under `drop` a round without clients leaves the model and the server's optimiser as they are."""
    return absent != "drop" or bool(present.any())

"""Who enters a round's direction, and with which coefficient, when some clients are absent.

With updates Δ_k = w_k − w^(t) and weights Θ on the simplex over all K clients, the round's direction is
u = Σ_k α_k m_k with α_k = Θ_k / Σ_{l ∈ S} Θ_l for k in S, where

| absent   | m_k                                                        | S                                    |
|----------|------------------------------------------------------------|--------------------------------------|
| keep     | Δ_k if it participates, else 0 (its unchanged w^(t))         | the cohort                           |
| drop     | Δ_k                                                        | who participates (nobody: no step)   |
| remember | Δ_k if it participates, else its last one (0 before any)   | the cohort, and all that are remembered |

`keep` is the paper's, `drop` what a real server does, `remember` is MIFA (Gu et al. 2021). The cohort are the clients
sampled for the round: a client that was not sampled is not absent, and has no part in S.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedunfold.core.algorithm import Absent
from fedunfold.core.messages import ClientUpdates, OpenSum, OpenUpdates, WeightedSum
from fedunfold.core.update_parts import PART, InParts


@dataclass(frozen=True)
class RememberedUpdates:
    """Last updates of clients by index, read one by one: a stack of them is a second copy, made once and only for those
    who need it."""

    memory: Mapping[int, Tensor]
    like: Tensor

    @cached_property
    def clients(self) -> Tensor:
        """Indices of the clients they come from, [n]."""
        return torch.tensor(list(self.memory), dtype=torch.long)

    @cached_property
    def rows(self) -> Tensor:
        """m_k, [n, d]."""
        return torch.stack(list(self.memory.values())) if self.memory else self.like

    def weighted_sum(self, coefficients: Tensor) -> WeightedSum:
        """Their sum with coefficients c [K]."""
        total = self.like.new_zeros(self.like.shape[1])
        for (_, row), c in zip(self.memory.items(), coefficients[self.clients].tolist(), strict=True):
            total.add_(row, alpha=c)
        # Without the stack: who stores the sum for a backward pass stores what is in it, too.
        return OpenSum(total, self.clients, type(self)(self.memory, self.like))

    def inner_products(self, vector: Tensor) -> Tensor:
        """⟨v, m_k⟩, [n]."""
        return torch.stack([row @ vector for row in self.memory.values()]) if self.memory else self.like @ vector


class RememberedInParts(RememberedUpdates, InParts):
    """Remembered updates that are read a part at a time."""

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        size, longest = self.like.shape[1], max(256, PART // max(1, len(self.memory)))
        for begin in range(0, size if self.memory else 0, longest):
            yield begin, torch.stack([row[begin : begin + longest] for row in self.memory.values()])


def with_memory(report: ClientUpdates, absent: Absent, memory: Mapping[int, Tensor]) -> ClientUpdates:
    """The report with all updates that enter the round, the table's m_k, in it."""
    if absent != "remember" or report.remembered is not None:
        return report
    updates = report.updates
    copies = updates.copies() if isinstance(updates, OpenUpdates) else list(updates.rows)
    latest = {int(k): row for k, row in zip(updates.clients, copies, strict=True)}
    for row in latest.values():
        report.layout.buffers(row).zero_()  # added again and again, a change of a variance makes it negative
    memory = dict(sorted({**memory, **latest}.items()))
    like = next(iter(memory.values())).new_empty(0, len(copies[0])) if copies else updates.rows[:0]
    kind = RememberedInParts if isinstance(updates, InParts) else RememberedUpdates
    return replace(report, remembered=kind(memory, like))


def eligible_clients(report: ClientUpdates, absent: Absent) -> Tensor:
    """The table's S, [K], for a report with memory."""
    if absent == "drop":
        return report.participated
    if absent == "keep" or bool(report.cohort.all()):
        return report.cohort
    eligible = report.cohort.clone()
    eligible[report.entering.clients] = True
    return eligible


def coefficients(weights: Tensor, eligible: Tensor) -> Tensor:
    """α from Θ [..., K] and S [..., K], differentiable in Θ; all 0 where no client of S has any weight."""
    if bool(eligible.all()):
        return weights
    chosen = torch.where(eligible, weights, 0.0)
    total = chosen.sum(-1, keepdim=True)
    return chosen / torch.where(total > 0, total, 1.0)

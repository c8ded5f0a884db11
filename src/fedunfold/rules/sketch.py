"""The products ⟨m_k, m_j⟩ of all pairs of a round's updates: exact where that is cheap, elsewhere from sketches."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, OpenUpdates, UpdateSet

EXACT_PRODUCTS = 2 * 10**8
"""Up to so many multiply-adds, n²d for n updates of d entries, products are exact: several milliseconds of one core, a
few hundredths of what local training of n such models takes. Beyond, sketches cost nd, as reading the updates does."""
BUCKETS = 4093
"""Entries of a sketch. A prime: the width of a layer never divides it, so that what belongs to one input of a layer
does not fall into one bucket."""
_SEED = 20220613


@dataclass(frozen=True)
class Sketches:
    """Short vectors whose products stand for those of the updates.

    Attributes:
        client_ids: Whose, n of them.
        rows: S m_k, [n, q].
        norms: ‖m_k‖, exact, [n].
    """

    client_ids: list[str]
    rows: Tensor
    norms: Tensor

    def products(self) -> Tensor:
        """About ⟨m_j, m_k⟩, [n, n], with exact ‖m_k‖² on the diagonal."""
        gram = (self.rows @ self.rows.T).cpu().double()
        gram.diagonal().copy_(self.norms.square())
        return gram

    def inner_products(self, vector: Tensor) -> Tensor:
        """About ⟨v, m_k⟩, [n]."""
        return (self.rows @ sketch(vector[None])[0].to(self.rows.device)).cpu().double()


def sketch(rows: Tensor) -> Tensor:
    """S m for rows m [n, d], [n, q]: every entry with a random sign, added to bucket i modulo q.

        (S m)_b = Σ_{i ≡ b mod q} σ_i m_i,   σ_i = ±1,   E ⟨S x, S y⟩ = ⟨x, y⟩

    The signs are the same in every round and for everybody. A cosine c is off by about √((1 + c²)/q), 0.016 for
    orthogonal vectors: the terms σ_i σ_j x_i y_j of different entries of a bucket have the mean 0, and together this
    variance, as long as no few entries hold most of a vector.

    Args:
        rows: m, [n, d].
    """
    n, d = rows.shape
    found = rows.new_zeros(n, min(d, BUCKETS))
    # In place, so that the rows are read once and nothing is as large as they are.
    signs = _signs(d, rows.dtype, rows.device)
    for begin in range(0, d, BUCKETS):
        block = rows[:, begin : begin + BUCKETS]
        found[:, : block.shape[1]].addcmul_(block, signs[begin : begin + BUCKETS])
    return found


@lru_cache(maxsize=4)
def _signs(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ, [d] of ±1."""
    drawn = torch.Generator().manual_seed(_SEED)
    return (torch.randint(0, 2, (d,), generator=drawn, dtype=torch.int8) * 2 - 1).to(device, dtype)


def sketches_of(report: ClientUpdates, known: Sketches | None) -> Sketches:
    """Sketches of all updates that enter a round; those of clients that sent none are known from the round before."""
    entering, fresh, ids = report.entering, report.updates, report.client_ids
    wanted = [ids[k] for k in entering.clients.tolist()]
    sent = [ids[k] for k in fresh.clients.tolist()]
    before = known.client_ids if known is not None else []
    if known is None or not set(wanted) <= {*sent, *before}:
        rows = report.layout.params(entering.rows)
        return Sketches(wanted, sketch(rows), _norms(entering, rows))
    rows = report.layout.params(fresh.rows)
    position = {name: i for i, name in enumerate([*before, *sent])}  # what was sent now counts
    chosen = torch.tensor([position[name] for name in wanted], dtype=torch.long)
    found = torch.cat([known.rows.to(rows.device), sketch(rows)])[chosen.to(rows.device)]
    return Sketches(wanted, found, torch.cat([known.norms, _norms(fresh, rows)])[chosen])


def few_enough(report: ClientUpdates) -> bool:
    """Whether all pairs of a round's updates can be multiplied as they are."""
    return len(report.entering.clients) ** 2 * report.updates.rows.shape[1] <= EXACT_PRODUCTS


def _norms(updates: UpdateSet, rows: Tensor) -> Tensor:
    known = updates.norms if isinstance(updates, OpenUpdates) else None  # screening has computed them
    found: Tensor = rows.norm(dim=1) if known is None else known
    return found.cpu().double()

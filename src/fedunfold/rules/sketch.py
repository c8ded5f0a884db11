"""The products ⟨m_k, m_j⟩ of all pairs of a round's updates: exact where that is cheap, elsewhere from sketches."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, OpenUpdates, UpdateSet
from fedunfold.core.params import ParamLayout
from fedunfold.core.update_parts import InParts

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
        products: About ⟨m_j, m_k⟩, [n, n], with exact ‖m_k‖² on the diagonal.
    """

    client_ids: list[str]
    rows: Tensor
    products: Tensor

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
    found = rows.new_zeros(len(rows), min(rows.shape[1], BUCKETS))
    _add_part(found, 0, rows, rows.shape[1])
    return found


def _add_part(found: Tensor, first: int, part: Tensor, d: int) -> None:
    """Add the entries from `first` on of vectors of d, a part [n, ≤ d], to their sketches."""
    # In place, so that the part is read once and nothing is as large as it is.
    signs, last = _signs(d, part.dtype, part.device), first + part.shape[1]
    for begin in range(first - first % BUCKETS, last, BUCKETS):
        here, end = max(begin, first), min(begin + BUCKETS, last)
        found[:, here - begin : end - begin].addcmul_(part[:, here - first : end - first], signs[here:end])


@lru_cache(maxsize=4)
def _signs(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ, [d] of ±1."""
    drawn = torch.Generator().manual_seed(_SEED)
    return (torch.randint(0, 2, (d,), generator=drawn, dtype=torch.int8) * 2 - 1).to(device, dtype)


def sketches_of(report: ClientUpdates, known: Sketches | None) -> Sketches:
    """Sketches of all updates that enter a round; of clients that sent none, all is known from the round before."""
    entering, fresh, ids = report.entering, report.updates, report.client_ids
    wanted = [ids[k] for k in entering.clients.tolist()]
    sent = {ids[k]: i for i, k in enumerate(fresh.clients.tolist())}
    before = {name: i for i, name in enumerate(known.client_ids)} if known is not None else {}
    if known is None or not set(wanted) <= sent.keys() | before.keys():
        sent, before, fresh = {name: i for i, name in enumerate(wanted)}, {}, entering
        known = None
    made, squares = _sketches_and_squares(fresh, report.layout)
    new = torch.tensor([i for i, name in enumerate(wanted) if name in sent], dtype=torch.long)
    old = torch.tensor([i for i, name in enumerate(wanted) if name not in sent], dtype=torch.long)
    chosen = torch.tensor([sent[wanted[i]] for i in new.tolist()], dtype=torch.long)
    rows = made.new_empty(len(wanted), made.shape[1])
    rows[new] = made[chosen]
    products = torch.empty(len(wanted), len(wanted), dtype=torch.float64)
    if known is not None:
        kept = torch.tensor([before[wanted[i]] for i in old.tolist()], dtype=torch.long)
        rows[old] = known.rows.to(rows.device)[kept]
        products[old[:, None], old] = known.products[kept[:, None], kept]
    across = (rows[new] @ rows.T).cpu().double()
    products[new] = across
    products[:, new] = across.T
    products[new, new] = squares[chosen]
    return Sketches(wanted, rows, products)


def products_of(report: ClientUpdates) -> Tensor:
    """⟨m_j, m_k⟩ of all updates that enter a round, [n, n], exactly."""
    entering = report.entering
    if not isinstance(entering, InParts):
        rows = report.layout.params(entering.rows)
        return rows @ rows.T
    n = len(entering.clients)
    found = torch.zeros(n, n, dtype=torch.float64)
    for _, part in _params_in_parts(entering, report.layout):
        found += part @ part.T
    return found


def few_enough(report: ClientUpdates) -> bool:
    """Whether all pairs of a round's updates can be multiplied as they are."""
    entries = report.layout.size or report.updates.rows.shape[1]  # rows may not be at hand
    return len(report.entering.clients) ** 2 * entries <= EXACT_PRODUCTS


def _sketches_and_squares(updates: UpdateSet, layout: ParamLayout) -> tuple[Tensor, Tensor]:
    """S m_k [n, q] and ‖m_k‖² [n]."""
    known = updates.norms if isinstance(updates, OpenUpdates) else None  # screening has computed them
    if not isinstance(updates, InParts):
        rows = layout.params(updates.rows)
        norms: Tensor = rows.norm(dim=1) if known is None else known
        return sketch(rows), norms.cpu().double().square()
    d = layout.num_params
    made, squares = torch.zeros(len(updates.clients), min(d, BUCKETS)), torch.zeros(len(updates.clients)).double()
    for begin, part in _params_in_parts(updates, layout):
        made = made.to(part.dtype)
        _add_part(made, begin, part, d)
        squares += part.square().sum(1)
    return made, squares if known is None else known.cpu().double().square()


def _params_in_parts(updates: InParts, layout: ParamLayout) -> Iterator[tuple[int, Tensor]]:
    for begin, part in updates.parts():
        if begin < layout.num_params:
            yield begin, part[:, : layout.num_params - begin]

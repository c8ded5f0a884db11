"""The products ⟨m_k, m_j⟩ of all pairs of a round's updates: exact where that is cheap, elsewhere from sketches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, OpenUpdates, UpdateSet
from fedunfold.core.params import ParamLayout
from fedunfold.core.update_parts import InParts

EXACT_PRODUCTS = 4 * 10**6
"""Up to so many multiply-adds, n²d for n updates of d entries, products are exact: a fifth of a millisecond of one
core. Beyond, sketches cost less, and hardly more where models are larger."""
BUCKETS = 4093
"""Entries of a sketch. A prime: the width of a layer never divides it, so that what belongs to one input of a layer
does not fall into one bucket."""
SAMPLED = 128
"""Of a large layer, a sketch reads one entry of so many."""
_SEED = 20220613


Numbers = NDArray[Any]


@dataclass(frozen=True)
class Sketches:
    """Short vectors whose products stand for those of the updates.

    Attributes:
        client_ids: Whose, n of them.
        rows: S m_k as long as m_k, [n, q].
        products: About ⟨m_j, m_k⟩, [n, n], with exact ‖m_k‖² on the diagonal; None where nobody asked for them.
    """

    client_ids: list[str]
    rows: Numbers
    products: NDArray[np.float64] | None

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """As they were when `state` was made."""
        products: Tensor | None = state["products"]
        numbers = None if products is None else products.numpy(force=True)
        return cls(state["client_ids"], state["rows"].numpy(force=True), numbers)

    @property
    def state(self) -> dict[str, Any]:
        """What the next round needs of them."""
        products = None if self.products is None else torch.from_numpy(self.products)
        return {"client_ids": self.client_ids, "rows": torch.from_numpy(self.rows), "products": products}


@dataclass(frozen=True)
class _Sample:
    """What a sketch reads.

    Attributes:
        entries: Indices of the entries read, in order, [p]; None: all d.
        factors: σ_i √(d_l/p_l) of each, [p].
    """

    entries: Tensor | None
    factors: Tensor


def sketch(rows: Tensor, layer_sizes: tuple[int, ...] = ()) -> Tensor:
    """S m for rows m [n, d], [n, q]: of every layer some entries, with random signs, added to bucket i modulo q.

        (S m)_b = Σ_{i ≡ b mod q} σ_i √(d_l/p_l) m_e(i),   σ_i = ±1,   E ⟨S x, S y⟩ = ⟨x, y⟩

    e(1) < … < e(p) are p_l of the d_l entries of every layer l, one of each of p_l equal pieces. Every layer has as
    large a part, and small ones are read whole: often much of an update is in the last one. Entries and signs are the
    same in every round and for everybody. A cosine c is off by about √((1 + c²)/q), 0.016 for orthogonal vectors, by
    the signs where p > q, and by no more by the choice of entries where those of a layer are alike.

    Args:
        rows: m, [n, d].
        layer_sizes: d_l; where they are not known, all entries are read.
    """
    sample = _sample(layer_sizes, rows.shape[1], rows.dtype, rows.device)
    found = rows.new_zeros(len(rows), min(len(sample.factors), BUCKETS))
    _add_part(found, 0, rows, sample)
    return found


def _add_part(found: Tensor, begin: int, part: Tensor, sample: _Sample) -> None:
    """Add the entries from `begin` on of vectors, a part [n, ≤ d], to their sketches."""
    first, last = begin, begin + part.shape[1]
    if sample.entries is not None:
        whole = begin == 0 and int(sample.entries[-1]) < last
        first, last = (0, len(sample.entries)) if whole else _between(sample.entries, first, last)
        part = part.index_select(1, sample.entries[first:last] - begin)
    for start in range(first - first % BUCKETS, last, BUCKETS):
        here, end = max(start, first), min(start + BUCKETS, last)
        found[:, here - start : end - start].addcmul_(part[:, here - first : end - first], sample.factors[here:end])


def _between(entries: Tensor, begin: int, end: int) -> tuple[int, int]:
    """Which of the sorted entries lie in [begin, end)."""
    first, last = torch.searchsorted(entries, entries.new_tensor([begin, end])).tolist()
    return first, last


@lru_cache(maxsize=4)
def _sample(layer_sizes: tuple[int, ...], d: int, dtype: torch.dtype, device: torch.device) -> _Sample:
    drawn = torch.Generator().manual_seed(_SEED)
    entries, factors, begin = [], [], 0
    for size in layer_sizes or (d,):
        least = BUCKETS // len(layer_sizes) if layer_sizes else size
        count = min(size, max(least, size // SAMPLED))
        within = torch.arange(count) + torch.rand(count, generator=drawn, dtype=torch.float64)
        # In double precision and rounded down: where every piece is one entry, they are all entries in order.
        chosen = (within * (size / count)).long().clamp(max=size - 1) if count < size else torch.arange(size)
        signs = torch.randint(0, 2, (count,), generator=drawn, dtype=torch.int8) * 2 - 1
        entries.append(begin + chosen)
        factors.append(signs.to(dtype) * (size / max(count, 1)) ** 0.5)
        begin += size
    read = torch.cat(entries)
    return _Sample(None if len(read) == d else read.to(device), torch.cat(factors).to(device))


def sketches_of(report: ClientUpdates, known: Sketches | None, wanted: list[str], compares: bool = True) -> Sketches:
    """Sketches of all updates that enter a round; of clients that sent none, all is known from the round before.

    Args:
        report: The round.
        known: Those of the round before.
        wanted: Whose updates enter, in order.
        compares: Whether products of all pairs are wanted.
    """
    fresh, layout = report.updates, report.layout
    sent = [report.client_ids[k] for k in fresh.clients.tolist()]
    before = {} if known is None else dict(zip(known.client_ids, range(len(known.client_ids)), strict=True))
    if known is None or not before.keys() | sent >= set(wanted) or (compares and known.products is None):
        rows, norms = _sketches_and_norms(report.entering, layout)
        everybody = np.arange(len(rows))
        return Sketches(wanted, rows, _products(rows, rows, norms, everybody) if compares else None)
    made, norms = _sketches_and_norms(fresh, layout)
    place = dict(zip(wanted, range(len(wanted)), strict=True))
    new = np.array([place[name] for name in sent], dtype=np.int64)
    kept = np.array([before.get(name, 0) for name in wanted])  # rows of those who sent are written over
    rows = known.rows[kept]
    rows[new] = made
    if not compares or known.products is None:
        return Sketches(wanted, rows, None)
    products = known.products[kept][:, kept]
    across = _products(made, rows, norms, new)
    products[new], products[:, new] = across, across.T
    return Sketches(wanted, rows, products)


def inner_products(rows: Numbers, vector: Tensor, norm: float, layer_sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """About ⟨v, m_k⟩ from sketches [n, q], [n]; v [d] is as long as `norm` says."""
    (one,) = _as_long(sketch(vector[None], layer_sizes), np.array([norm]))
    found: NDArray[np.float64] = (rows @ one).astype(np.float64)
    return found


def _products(rows: Numbers, others: Numbers, norms: Numbers, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Those of sketches [m, q] with [n, q], which have the first ones at these places: there the norms are exact."""
    found: NDArray[np.float64] = (rows @ others.T).astype(np.float64)
    found[np.arange(len(rows)), places] = np.square(norms)
    return found


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


def few_enough(report: ClientUpdates, n: int) -> bool:
    """Whether all pairs of a round's n updates can be multiplied as they are."""
    entries = report.layout.size or report.updates.rows.shape[1]  # rows may not be at hand
    return n**2 * entries <= EXACT_PRODUCTS


def _sketches_and_norms(updates: UpdateSet, layout: ParamLayout) -> tuple[Numbers, NDArray[np.float64]]:
    """S m_k as long as m_k, [n, q], and ‖m_k‖, [n]; only these leave the device."""
    norms = updates.norms if isinstance(updates, OpenUpdates) else None  # screening has computed them
    if not isinstance(updates, InParts):
        rows = layout.params(updates.rows)
        made = sketch(rows, layout.layer_sizes)
        norms = rows.norm(dim=1) if norms is None else norms
    else:
        squares = torch.zeros(len(updates.clients), dtype=torch.float64)
        made = squares.new_zeros(len(squares), 0)
        for begin, part in _params_in_parts(updates, layout):
            sample = _sample(layout.layer_sizes, layout.num_params, part.dtype, part.device)
            if not begin:
                made = part.new_zeros(len(part), min(len(sample.factors), BUCKETS))
            _add_part(made, begin, part, sample)
            if norms is None:
                squares += part.square().sum(1)
        norms = squares.sqrt() if norms is None else norms
    exact = norms.numpy(force=True).astype(np.float64)
    return _as_long(made, exact), exact


def _as_long(made: Tensor, norms: NDArray[np.float64]) -> Numbers:
    """Rows [n, q] as long as the vectors they stand for: then a cosine of two of them lies within [−1, 1]."""
    lengths = torch.linalg.vector_norm(made, dim=1).numpy(force=True)
    rows: Numbers = made.numpy(force=True)
    rows *= (norms / np.where(lengths > 0, lengths, 1)).astype(rows.dtype)[:, None]
    return rows


def _params_in_parts(updates: InParts, layout: ParamLayout) -> Iterator[tuple[int, Tensor]]:
    for begin, part in updates.parts():
        if begin < layout.num_params:
            yield begin, part[:, : layout.num_params - begin]

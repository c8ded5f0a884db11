"""What can be measured of a round, each number computed when the first feature asks for it.

Numbers of clients are NumPy arrays: a round has dozens of operations on a few of them, and torch takes microseconds for
each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.messages import ClientUpdates, OpenUpdates, UpdateSet
from fedunfold.rules.sketch import Sketches, few_enough, inner_products, products_of, sketches_of

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Measurements:
    """A round and what is known of those before it, with n clients that enter it.

    Attributes:
        report: What clients sent.
        known: The state that the last round left; empty in the first.
        horizon: T, where it is known.
        compares: Whether products of all pairs are read.
    """

    report: ClientUpdates
    known: dict[str, Any]
    horizon: int | None
    compares: bool = True

    # --- counts ------------------------------------------------------------------------------------------

    @cached_property
    def entering(self) -> UpdateSet:
        """The updates of the clients."""
        return self.report.entering

    @cached_property
    def clients(self) -> NDArray[np.int64]:
        """Indices of the clients, [n]."""
        found: NDArray[np.int64] = self.entering.clients.numpy(force=True)
        return found

    @cached_property
    def names(self) -> list[str]:
        """Who they are, [n]."""
        return [self.report.client_ids[k] for k in self.clients.tolist()]

    @cached_property
    def sizes(self) -> Numbers:
        """N_k, [n]."""
        return self.report.num_examples.numpy(force=True)[self.clients].astype(np.float64)

    @cached_property
    def shares(self) -> Numbers:
        """p_k = N_k/ΣN, [n]."""
        found: Numbers = self.sizes / self.sizes.sum()
        return found

    @cached_property
    def seen(self) -> dict[str, list[float]]:
        """Of every client that ever participated: in how many rounds, which round's model it trained last, with how
        many steps and, where it was reported, with which norm."""
        report = self.report
        stale = [0] * len(report.client_ids) if report.staleness is None else report.staleness.tolist()
        found: dict[str, list[float]] = dict(self.known.get("seen", {}))
        steps, norm = report.num_steps.tolist(), report.metrics.norm
        norms = None if norm is None else norm.tolist()
        for k in compress(range(len(steps)), report.participated.tolist()):
            name = report.client_ids[k]
            reported = [] if norms is None or math.isnan(norms[k]) else [norms[k]]
            presences = found[name][0] + 1.0 if name in found else 1.0
            found[name] = [presences, float(report.round - stale[k]), float(steps[k]), *reported]
        return found

    @cached_property
    def _past(self) -> list[list[float]]:
        """What `seen` says of each client."""
        seen, unseen = self.seen, [0.0, float(self.report.round), 0.0]
        return [seen.get(name, unseen) for name in self.names]

    @cached_property
    def presences(self) -> Numbers:
        """In how many rounds each client was seen, [n]."""
        return np.array([known[0] for known in self._past])

    @cached_property
    def last_seen(self) -> Numbers:
        """In which round it was last, [n]."""
        return np.array([known[1] for known in self._past])

    @cached_property
    def steps(self) -> Numbers:
        """With how many steps then, 0 where it is not known, [n]."""
        return np.array([known[2] for known in self._past])

    # --- updates -----------------------------------------------------------------------------------------

    @cached_property
    def norms(self) -> Numbers:
        """‖m_k‖, [n], as clients reported them, or of their updates."""
        if self.report.metrics.norm is not None:
            return np.array([known[3] if len(known) > 3 else 0.0 for known in self._past])
        found: Numbers = np.sqrt(self.products.diagonal().clip(min=0))
        return found

    @cached_property
    def sketches(self) -> Sketches | None:
        """None where the updates themselves are multiplied: few of them, or with nothing but one vector, unless they
        are remembered and would all be read for it again."""
        remembered = self.report.remembered is not None and isinstance(self.report.updates, OpenUpdates)
        if not (self.compares or remembered) or few_enough(self.report, len(self.clients)):
            return None
        known = self.known.get("sketches")
        before = None if known is None else Sketches.from_state(known)
        return sketches_of(self.report, before, self.names, self.compares)

    @cached_property
    def products(self) -> Numbers:
        """⟨m_j, m_k⟩, [n, n]; only these leave the device."""
        if self.sketches is None:
            return _numbers(products_of(self.report))
        assert self.sketches.products is not None
        return self.sketches.products

    @cached_property
    def to_mean(self) -> Numbers:
        """⟨m_k, m̄⟩, [n]."""
        return self.products @ self.shares

    @cached_property
    def mean_square(self) -> float:
        """‖m̄‖²."""
        return float(self.shares @ self.to_mean)

    @cached_property
    def mean_norm(self) -> float:
        """‖m̄‖."""
        return math.sqrt(max(self.mean_square, 0.0))

    # --- the round before --------------------------------------------------------------------------------

    @cached_property
    def previous(self) -> Tensor | None:
        """ū, without buffers, [d]."""
        layout, found = self.report.layout, self.report.previous
        if found is None or not layout.num_buffer_entries:
            return found
        return layout.with_buffers(found, torch.zeros_like(layout.buffers(found)))

    @cached_property
    def previous_norm(self) -> float:
        """‖ū‖; 0 where there is none."""
        return 0.0 if self.previous is None else float(torch.linalg.vector_norm(self.previous))

    @cached_property
    def along(self) -> Numbers:
        """⟨m_k, ū⟩, [n], from sketches where there are some; NaN of a client that does not say."""
        if self.previous is None:
            return np.zeros(len(self.clients))
        if self.sketches is None:
            return _numbers(self.entering.inner_products(self.previous))
        layout = self.report.layout
        vector, rows = layout.params(self.previous), self.sketches.rows
        return inner_products(rows, vector, self.previous_norm, layout.layer_sizes)

    @cached_property
    def before(self) -> Tensor | None:
        """ū as it was in the round before, [d]; what was read from a checkpoint is moved to where ū is."""
        found: Tensor | None = self.known.get("before")
        return found if found is None or self.previous is None else found.to(self.previous.device)

    @cached_property
    def norm_before(self) -> float:
        """Its norm; 0 where there was none."""
        return 0.0 if self.before is None else float(torch.linalg.vector_norm(self.before))


def _numbers(values: Tensor) -> Numbers:
    found: Numbers = values.numpy(force=True).astype(np.float64)
    return found

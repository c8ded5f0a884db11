"""What can be measured of a round, each number computed when the first feature asks for it.

Numbers of clients are NumPy arrays: a round has dozens of operations on a few of them, and torch takes microseconds for
each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.sketch import Sketches, few_enough, products_of, sketches_of

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Measurements:
    """A round and what is known of those before it, with n clients that enter it.

    Attributes:
        report: What clients sent.
        known: The state that the last round left; empty in the first.
        horizon: T, where it is known.
    """

    report: ClientUpdates
    known: dict[str, Any]
    horizon: int | None

    # --- counts ------------------------------------------------------------------------------------------

    @cached_property
    def clients(self) -> Tensor:
        """Indices of the clients, [n]."""
        return self.report.entering.clients.cpu()

    @cached_property
    def sizes(self) -> Numbers:
        """N_k, [n]."""
        found: Numbers = _numbers(self.report.num_examples)[self.clients.numpy()]
        return found

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
        norms = [math.nan] * len(steps) if norm is None else norm.tolist()
        for k, participated in enumerate(report.participated.tolist()):
            if participated:
                name = report.client_ids[k]
                reported = [] if math.isnan(norms[k]) else [norms[k]]
                trained = float(report.round - stale[k])
                found[name] = [found.get(name, [0.0])[0] + 1.0, trained, float(steps[k]), *reported]
        return found

    @cached_property
    def past(self) -> Numbers:
        """Of each client rounds seen, last round, steps then and norm then, 0 where it is not known, [n, 4]."""
        unseen = [0.0, float(self.report.round), 0.0]
        found = [self.seen.get(self.report.client_ids[k], unseen) for k in self.clients.tolist()]
        return np.array([(*own, 0.0)[:4] for own in found]).reshape(-1, 4)

    # --- updates -----------------------------------------------------------------------------------------

    @cached_property
    def norms(self) -> Numbers:
        """‖m_k‖, [n], as clients reported them, or of their updates."""
        reported = self.report.metrics.norm is not None
        found: Numbers = self.past[:, 3] if reported else np.sqrt(self.products.diagonal().clip(min=0))
        return found

    @cached_property
    def sketches(self) -> Sketches | None:
        """None where products need none."""
        if few_enough(self.report):
            return None
        known = self.known.get("sketches")
        return sketches_of(self.report, None if known is None else Sketches(**known))

    @cached_property
    def products(self) -> Numbers:
        """⟨m_j, m_k⟩, [n, n]; only these leave the device."""
        if self.sketches is not None:
            return self.sketches.products.numpy()
        return _numbers(products_of(self.report))

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
        return None if found is None else layout.with_buffers(found, torch.zeros_like(layout.buffers(found)))

    @cached_property
    def previous_norm(self) -> float:
        """‖ū‖; 0 where there is none."""
        return 0.0 if self.previous is None else float(self.previous.norm())

    @cached_property
    def along(self) -> Numbers:
        """⟨m_k, ū⟩, [n], where there are sketches about; NaN of a client that does not say."""
        if self.previous is None:
            return np.zeros(len(self.clients))
        if self.report.metrics.norm is None and self.sketches is not None:
            return _numbers(self.sketches.inner_products(self.report.layout.params(self.previous)))
        return _numbers(self.report.entering.inner_products(self.previous))

    @property
    def before(self) -> Tensor | None:
        """ū as it was in the round before, [d]; what was read from a checkpoint is moved to where ū is."""
        found: Tensor | None = self.known.get("before")
        return found if found is None or self.previous is None else found.to(self.previous.device)


def _numbers(values: Tensor) -> Numbers:
    found: Numbers = values.numpy(force=True).astype(np.float64)
    return found

"""Rejecting updates that cannot be used, before anybody's weight is worked out.

A client that is rejected counts as absent in that round, for the weighting rule, the aggregation and the gradient of
the weights: its update, its losses and its part of the outer loss are left out, and the server remembers none of them.

`finite` rejects what is NaN, infinite or too large to be measured, always; where nobody is left of those who
participated, it is the training that diverges, and an error. `norm` also rejects an update whose norm is far above the
federation's. With the norm of an update over the root of its steps,

    x_k = log(‖Δ_k‖ / √τ_k)      (τ_k = 1 where the local optimiser scales all to the same number of steps, or
                                  where the steps are not known)

and the median m and spread s = 1.4826 · median|x − m| over the participating clients, client k is rejected where

    x_k > m + max(3.5 s, log 5).

- Why the root: training of τ steps comes as far as τ where gradients agree, as √τ where they are noise, and no farther
  where it has converged. √τ is wrong by at most √τ either way.
- Why the logarithm, and the median: norms differ by factors, and fewer than half of the clients cannot move it.
- Why log 5: five clients may lie within a few percent of each other, and then s says nothing. Honest clients of the
  bundled environments reach almost 4 times the median (digits-quantity-skew under nova).
- Why only large norms: an update that is too small harms no more than an absence.
- Fewer than 5 clients are no range: those accepted in earlier rounds are added, the latest rounds first, until there
  are 5, and where there are not even then, nobody is rejected for a norm. Updates get smaller over a training,
  so that earlier rounds err on the lenient side.

An honest client that holds what nobody else does sends large updates too: look at who is rejected, and why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.algorithm import UpdateFilter
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.core.outcomes import RejectedUpdate
from fedunfold.core.update_parts import InParts

DEVIATIONS = 3.5
TIMES = 5.0
AT_LEAST = 5
ROUNDING = 1e-9  # a norm that equals the limit is accepted, in whatever units
FEW = 5  # clients named in an error
NOT_USABLE = "has a NaN, infinite or far too large value"
NOTHING = 1e-100  # in place of the norm 0, which has no logarithm


@dataclass(frozen=True)
class FilterResult:
    """A round with what was accepted.

    Attributes:
        report: The round, in which rejected clients are absent, with the norms of the updates that are left.
        log_norms: x_k of those accepted, NaN for the others, [K].
        rejected: Who was rejected, and why.
    """

    report: ClientUpdates
    log_norms: Tensor
    rejected: tuple[RejectedUpdate, ...]


def is_usable(updates: Tensor) -> Tensor:
    """Which rows [P] are finite and small enough to be measured, and so to be added up."""
    return torch.isfinite(updates.norm(dim=1))


def usable_ones(updates: OpenUpdates) -> Tensor:
    """Which of a round's updates are usable, buffers included, [n]; those in parts are screened when they are read."""
    if isinstance(updates, InParts) and updates.norms is not None:
        return updates.norms.isfinite()
    return is_usable(updates.rows)


def filter_updates(
    report: ClientUpdates, kind: UpdateFilter, past: Sequence[Tensor], *, normalized: bool = False
) -> FilterResult:
    """Reject the updates of a round that cannot be used.

    Args:
        report: The round.
        kind: Which updates are rejected.
        past: `log_norms` of earlier rounds.
        normalized: Whether the local optimiser scales all updates to the same number of steps.
    """
    log_norms, reasons = np.full(len(report.client_ids), math.nan), dict(report.rejected)
    if isinstance(updates := report.updates, OpenUpdates):
        measured = _norms(report, updates)
        if updates.norms is None:
            report = replace(report, updates=replace(updates, norms=measured))
        clients, norms = updates.clients.numpy(), measured.numpy()
        finite = np.isfinite(norms)
        if report.layout.num_buffer_entries:
            finite = usable_ones(updates).cpu().numpy()
        if len(clients) and not finite.any():
            raise DivergenceError(_all_rejected(report, {*reasons, *(report.client_ids[k] for k in clients)}))
        steps = np.ones(len(clients)) if normalized else np.maximum(report.num_steps.numpy()[clients], 1)
        found = np.log(np.maximum(norms / np.sqrt(steps), NOTHING))
        accepted = finite.copy()
        reasons |= {report.client_ids[k]: NOT_USABLE for k in clients[~finite]}
        if kind == "norm":
            middle, limit = _range(found[finite], past)
            accepted &= found <= limit
            for k, x in zip(clients, found, strict=True):
                if x > limit and report.client_ids[k] not in reasons:
                    reasons[report.client_ids[k]] = (
                        f"sends an update whose norm is {_times(x - middle)} times the median, "
                        f"of {_times(limit - middle)} times at most"
                    )
        log_norms[clients[accepted]] = found[accepted]
        report = report.accept(torch.from_numpy(accepted))
    rejected = tuple(RejectedUpdate(report.round, key, reasons[key]) for key in report.client_ids if key in reasons)
    return FilterResult(report, torch.from_numpy(log_norms), rejected)


def _norms(report: ClientUpdates, updates: OpenUpdates) -> Tensor:
    """‖Δ_k‖ [P]; buffers are no part of a step, and may be far larger than one."""
    if updates.norms is not None:
        return updates.norms
    norms: Tensor = report.layout.params(updates.rows).norm(dim=1)
    return norms.cpu().double()


def _range(found: np.ndarray, past: Sequence[Tensor]) -> tuple[float, float]:
    """(m, the largest that is accepted); infinite where there is too little to judge by."""
    known = found
    for row in reversed(past):
        if len(known) >= AT_LEAST:
            break
        known = np.concatenate([known, row[~row.isnan()].numpy()])
    if len(known) < AT_LEAST:
        return math.nan, math.inf
    middle = float(np.median(known))
    spread = 1.4826 * float(np.median(np.abs(known - middle)))
    return middle, middle + max(DEVIATIONS * spread, math.log(TIMES)) + ROUNDING


def _times(log: float) -> str:
    return f"{math.exp(min(log, 700.0)):.3g}"


def _all_rejected(report: ClientUpdates, bad: set[str]) -> str:
    named = ", ".join(f"client '{key}'" for key in sorted(bad)[:FEW])
    more = f" and {len(bad) - FEW} more" if len(bad) > FEW else ""
    return (
        f"round {report.round}: no update is finite and small enough to be added up, not those of {named}{more}; "
        "lower the learning rate of the clients."
    )

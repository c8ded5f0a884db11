"""Setting aside updates that cannot be used, before anybody's weight is worked out.

A client that is set aside counts as absent in that round, for the weighting rule, the aggregation and the gradient of
the weights: its update, its losses and its part of the outer loss are left out, and the server remembers none of them.

`finite` sets aside what is NaN, infinite or too large to be measured, always; where nobody is left of those who were
there, it is the training that diverges, and an error. `norm` does so too with an update that is far longer than the
federation's. With the length of an update over the root of its steps,

    x_k = log(‖Δ_k‖ / √τ_k)      (τ_k = 1 where the local update scales all walks to the same number of steps, or
                                  where the steps are not known)

and the median m and spread s = 1.4826 · median|x − m| over the present clients, client k is set aside where

    x_k > m + max(3.5 s, log 5).

- Why the root: a walk of τ steps comes as far as τ where gradients agree, as √τ where they are noise, and no farther
  where it has arrived. √τ is wrong by at most √τ either way.
- Why the logarithm, and the median: lengths differ by factors, and fewer than half of the clients cannot move it.
- Why log 5: five clients may lie within a few percent of each other, and then s says nothing. Honest clients of the
  bundled environments reach almost 4 times the median (digits-quantity-skew under nova).
- Why only the longer ones: an update that is too short harms no more than an absence.
- Fewer than 5 clients are no range: those accepted in earlier rounds are added, the latest rounds first, until there
  are 5, and where there are not even then, nobody is set aside for a length. Updates get shorter over a training,
  so that earlier rounds err on the lenient side.

An honest client that holds what nobody else does sends long updates too: look at who is set aside, and why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.federation import ClientUpdates

UpdateFilter = Literal["finite", "norm"]
DEVIATIONS = 3.5
TIMES = 5.0
AT_LEAST = 5
ROUNDING = 1e-9  # what is just as long as the limit is let through, in whatever units
FEW = 5  # clients named in an error
NOT_USABLE = "has a NaN, infinite or far too large value"
NOTHING = 1e-100  # the length of an update of 0, which has no logarithm


@dataclass(frozen=True)
class RejectedUpdate:
    """A client whose part of a round was not used, and why.

    >>> RejectedUpdate(round=3, client="hospital-b", reason="has a NaN").client
    'hospital-b'
    """

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class FilterResult:
    """A round's report with what is left, x_k of those accepted (NaN for the others) [K], and who was set aside."""

    report: ClientUpdates
    lengths: Tensor
    rejected: tuple[RejectedUpdate, ...]


def check_update_filter(screen: str) -> UpdateFilter:
    """It, where it is one of the two; anything else is refused."""
    if screen not in get_args(UpdateFilter):
        raise InputError(f"unknown screening '{screen}'; choose finite or norm.")
    return cast(UpdateFilter, screen)


def usable(updates: Tensor) -> Tensor:
    """Which rows [P] are finite and small enough to be measured, and so to be added up."""
    return torch.isfinite(updates.norm(dim=1))


def filter_updates(
    report: ClientUpdates,
    screen: UpdateFilter,
    past: Sequence[Tensor],
    *,
    same_steps: bool = False,
) -> FilterResult:
    """Look at a round's updates, and set aside those that cannot be used.

    `past` are the lengths of earlier rounds; `same_steps` says that the local update scales all walks alike.
    """
    lengths = np.full(len(report.keys), math.nan)
    reasons = dict(report.refused)
    if report.hidden is None:
        there = np.flatnonzero(report.present.numpy())
        norms = _norms(report).numpy()
        finite = usable(report.updates).cpu().numpy() if report.statistics else np.isfinite(norms)
        own = np.ones(len(there)) if same_steps else np.maximum(report.steps.numpy()[there], 1)
        found = np.log(np.maximum(norms / np.sqrt(own), NOTHING))
        if len(there) and not finite.any():
            bad = sorted({*reasons, *(report.keys[k] for k in there.tolist())})
            named = ", ".join(f"client '{key}'" for key in bad[:FEW])
            more = f" and {len(bad) - FEW} more" if len(bad) > FEW else ""
            raise DivergenceError(
                f"round {report.round}: no update is finite and small enough to be added up, not those of "
                f"{named}{more}; lower the learning rate of the clients."
            )
        accepted = finite.copy()
        reasons |= {report.keys[k]: NOT_USABLE for k in there[~finite]}
        if screen == "norm":
            middle, most = _range(found[finite], past)
            accepted &= found <= most
            for k, x in zip(there, found, strict=True):
                if x > most and report.keys[k] not in reasons:
                    reasons[report.keys[k]] = (
                        f"sends an update {_times(x - middle)} times as long as the median, "
                        f"of {_times(most - middle)} times at most"
                    )
        lengths[there[accepted]] = found[accepted]
        report = _of(report, accepted)
    rejected = tuple(RejectedUpdate(report.round, key, reasons[key]) for key in report.keys if key in reasons)
    return FilterResult(report, torch.from_numpy(lengths), rejected)


def _norms(report: ClientUpdates) -> Tensor:
    """‖Δ_k‖ [P]."""
    if report.norms is not None:
        return report.norms
    # Running statistics are no part of a step, and may be far larger than one.
    norms: Tensor = report.updates[:, : report.updates.shape[1] - report.statistics].norm(dim=1)
    return norms.cpu().double()


def _range(found: np.ndarray, past: Sequence[Tensor]) -> tuple[float, float]:
    """(m, the longest that is accepted); infinite where there is too little to judge by."""
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


def _of(report: ClientUpdates, accepted: np.ndarray) -> ClientUpdates:
    """The report where of the present clients only the accepted [P] are left, with all outer parts summed up."""
    if accepted.all() and report.per_client_outer_loss is None and report.per_client_outer_gradients is None:
        return report
    kept = torch.from_numpy(accepted)
    outer_loss, outer_gradient = report.outer_loss, report.outer_gradient
    if report.per_client_outer_loss is not None:
        outer_loss += float(report.per_client_outer_loss[kept].sum())
    kept = kept.to(report.updates.device)
    if report.per_client_outer_gradients is not None:
        own = report.per_client_outer_gradients[kept].sum(0)
        outer_gradient = own if outer_gradient is None else outer_gradient + own
    summed = replace(
        report,
        outer_loss=outer_loss,
        outer_gradient=outer_gradient,
        per_client_outer_loss=None,
        per_client_outer_gradients=None,
    )
    if accepted.all():
        return summed
    present = report.present.clone()
    present[report.present] = torch.from_numpy(accepted)
    left_out = report.present & ~present

    def unsaid(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else torch.where(left_out.to(numbers.device), math.nan, numbers)

    return replace(
        summed,
        present=present,
        steps=torch.where(present, report.steps, 0),
        updates=report.updates[kept],
        gradients=None if report.gradients is None else report.gradients[kept],
        norms=None if report.norms is None else report.norms[torch.from_numpy(accepted)],
        loss=unsaid(report.loss),
        start_loss=unsaid(report.start_loss),
        accuracy=unsaid(report.accuracy),
    )

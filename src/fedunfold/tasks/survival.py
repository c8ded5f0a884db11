"""Time until an event, of which some rows only know that it came later."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks.regression import finite_numbers, zeros_and_ones

PAIRS_AT_ONCE = 2**24


@TASKS.register("survival")
@dataclass(frozen=True)
class Survival(Task):
    """Cox's partial likelihood: the negative logarithm of how likely the events came in this order, per row.

        ℓ_i = δ_i (log Σ_{j: t_j ≥ t_i} exp(z_j) − z_i)                                       (Breslow)

    for risks z [B, 1] and targets (time t, event δ) [B, 2]; the risk set is the minibatch, and one without an event
    has the loss 0. With d events at the same time, Efron takes (l/d) Σ_{events at t_i} exp(z_j) off the sum for the
    l-th of them, l = 0 … d−1. The metric is Harrell's concordance index: of the pairs of rows of which is known whose
    event came first, the fraction whose risks are in that order, equal risks counting half; those of several clients
    are weighted by their pairs.

    Attributes:
        ties: "efron" or "breslow".

    Reference: Cox 1972, Regression Models and Life-Tables; Efron 1977; Harrell et al. 1982.

    >>> task = Survival()
    >>> targets = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]])
    >>> task.losses(torch.zeros(3, 1), targets).exp().tolist()
    [3.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "survival"
    primary: ClassVar[str] = "concordance"
    rows_interact: ClassVar[bool] = True
    ties: Literal["efron", "breslow"] = "efron"

    def __post_init__(self) -> None:
        if self.ties not in ("efron", "breslow"):
            raise InputError(f"ties are handled after efron or breslow, not {self.ties!r}.")

    @property
    def num_outputs(self) -> int:
        return 1

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.shape[1:] != (2,):
            raise InputError(f"{name} has shape {targets.shape}; give (time, event) in every row.")
        numbers = finite_numbers(targets, name)
        zeros_and_ones(targets[:, 1], name, "an event")
        if (numbers[:, 0] < 0).any():
            row = int((numbers[:, 0] < 0).argmax())
            raise InputError(f"{name} has the negative time {numbers[row, 0]:g} in row {row}; give times from 0.")
        return numbers

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), 1

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # In float64, relative to the largest: torch.logcumsumexp has no second derivative where a slope is 0.
        risks, (times, events) = outputs[:, 0].double(), targets.double().unbind(1)
        order = torch.argsort(times, descending=True, stable=True)
        top = risks.detach().max()
        later = (risks[order] - top).exp().cumsum(0).log() + top
        # The risk set of a row ends with the last row of the same time.
        ends = torch.searchsorted(-times[order], -times, right=True) - 1
        at_risk = later[ends]
        if self.ties == "efron":
            at_risk = at_risk + self._tied(risks, at_risk, times, events)
        return (events * (at_risk - risks)).to(outputs.dtype)

    def _tied(self, risks: Tensor, at_risk: Tensor, times: Tensor, events: Tensor) -> Tensor:
        """log(1 − (l/d) Σ_tied exp(z_j) / Σ_at risk exp(z_j)) for the l-th of d events of one time."""
        together = (times[:, None] == times) & (events * events[:, None] > 0)
        size = together.sum(1).clamp(min=1)
        if int(size.max()) == 1:
            return torch.zeros_like(risks)
        rank = together.tril(-1).sum(1)
        shares = torch.where(together, (risks - at_risk[:, None]).exp(), 0.0).sum(1)
        return torch.log1p(-(rank / size) * shares)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        risks, (times, events) = outputs[:, 0].double(), targets.double().unbind(1)
        right = comparable = risks.new_zeros(())
        happened = torch.nonzero(events)[:, 0]
        for first in torch.split(happened, max(1, PAIRS_AT_ONCE // max(1, len(times)))):
            # An event at the time at which another row was last seen came before that row's.
            later = (times[first, None] < times) | ((times[first, None] == times) & (events == 0))
            gap = risks[first, None] - risks
            comparable = comparable + later.sum()
            right = right + ((gap > 0) & later).sum() + 0.5 * ((gap == 0) & later).sum()
        return torch.stack([right, comparable])

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        return {"concordance": float(statistics[0] / statistics[1])}

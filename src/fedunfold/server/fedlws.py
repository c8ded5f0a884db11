"""FedLWS: layers shrink where clients disagree."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State


@SERVER_OPTIMIZERS.register("fedlws")
@dataclass(frozen=True)
class FedLWS(ServerOptimizer):
    """FedLWS: every layer of the aggregated model is multiplied by a factor of its own, a weight decay that adapts.

        w ← γ (w + u),   γ = ‖w‖ / (‖w‖ + τ ‖u‖),   τ = clip(β · mean_k ‖Δ_k − Δ̄‖, τ_min, τ_max)

    with w, u and Δ_k those of the layer, one module's parameters, and Δ̄ the plain mean of the updates. A long step on
    which clients disagree shrinks the layer most. A layer of zeros is not shrunk, or it would stay 0 for ever; with
    τ_max = 0 it is plain averaging.

    It needs every client's update, so it does not work with secure ones. The mean deviation is a constant for the
    adjoint; what γ owes to w and u is differentiated.

    Attributes:
        beta: β ≥ 0.
        min_tau: τ_min ≥ 0.
        max_tau: τ_max ≥ τ_min. Defaults are those of the published code.

    Reference: Shi et al. 2025, FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking.

    >>> from fedunfold.core.params import ParamLayout
    >>> info = RoundInfo(0, ParamLayout(), *[torch.ones(2)] * 4, spread=torch.tensor([10.0]))
    >>> server = FedLWS(beta=0.05, min_tau=0, max_tau=1)  # τ = 0.5, ‖w‖ = 5, ‖u‖ = 10, γ = 0.5
    >>> server.update(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), (), info)[0].tolist()
    [4.5, 6.0]
    """

    name: ClassVar[str] = "fedlws"
    reads_spread: ClassVar[bool] = True
    beta: float = 0.03
    min_tau: float = 0.01
    max_tau: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.beta < math.inf and 0 <= self.min_tau <= self.max_tau < math.inf):
            raise InputError(
                "server optimiser fedlws needs a finite beta >= 0 and 0 <= min_tau <= max_tau < inf, not "
                f"{self.beta}, {self.min_tau} and {self.max_tau}."
            )

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        if info is None or info.spread is None:
            where = "" if info is None else f"round {info.round}: "
            raise InputError(
                f"{where}server optimiser fedlws needs how far clients' updates lie apart, which is not known here; "
                "take a federation whose updates the server sees, or another server."
            )
        layout, moved = info.layout, model + direction
        taus = (self.beta * info.spread.to(model)).clamp(self.min_tau, self.max_tau)
        pieces = zip(*map(layout.split_layers, (model, direction, moved)), taus, strict=True)
        shrunk = [_factor(w.norm(), tau * u.norm()) * after for w, u, after, tau in pieces]
        return torch.cat([*shrunk, layout.buffers(moved)]), ()


def _factor(size: Tensor, pull: Tensor) -> Tensor:
    """γ = ‖w‖/(‖w‖ + τ‖u‖), 1 for a layer of zeros."""
    total = size + pull
    return torch.where(size > 0, size / torch.where(total > 0, total, 1.0), 1.0)

"""FedExP: a step as long as the clients disagree."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State
from fedunfold.server.sgd import check_open_interval


@SERVER_OPTIMIZERS.register("exp")
@dataclass(frozen=True)
class Exp(ServerOptimizer):
    """FedExP:  w ← w + η u,  η = max(1, Σ_k α_k ‖Δ_k‖² / (2 (‖u‖² + ε))).

    Where clients point in different directions their mean is short, and the step is extrapolated. It needs every
    client's ‖Δ_k‖, so it works with open updates of the round alone: not with secure ones, nor with `remember`.
    Coefficients and norms are constants for the adjoint; what η owes to u is differentiated.

    Attributes:
        epsilon: ε > 0, which bounds η where u is small; it has the scale of ‖u‖².

    Reference: Jhunjhunwala et al. 2023, FedExP: Speeding Up Federated Averaging via Extrapolation. With plain means,
    α_k = 1/n, it is theirs.

    >>> import torch
    >>> from fedunfold.core.params import ParamLayout
    >>> norms = torch.tensor([3.0, 4.0])
    >>> info = RoundInfo(0, ParamLayout(), torch.full((2,), 0.5), norms, torch.ones(2), torch.ones(2))
    >>> Exp(epsilon=0.25).update(torch.zeros(2), torch.tensor([1.5, 2.0]), (), info)[0].tolist()  # η = 12.5 / 13
    [1.5, 2.0]
    >>> Exp(epsilon=0.25).update(torch.zeros(2), torch.tensor([1.5, 0.0]), (), info)[0].tolist()  # η = 12.5 / 5
    [3.75, 0.0]
    """

    name: ClassVar[str] = "exp"
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        check_open_interval(self, epsilon=math.inf)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        if info is None or info.norms is None:
            where = "" if info is None else f"round {info.round}: "
            raise InputError(
                f"{where}server optimiser exp needs the norm of every client's update, which secure and remembered "
                "updates do not have; take open updates and absent='drop' or 'keep', or another server."
            )
        squares = float(info.coefficients.double() @ info.norms.double().square())
        length = info.layout.params(direction).square().sum()
        return model + (squares / (2 * (length + self.epsilon))).clamp(min=1) * direction, ()

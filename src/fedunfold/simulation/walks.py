"""Which walk a round takes: compiled code for the whole of it where there is some, else torch step by step."""

from functools import cached_property

import numpy as np
from torch import Tensor

from fedunfold.losses import OuterLoss
from fedunfold.simulation.fixed_model import FixedModel
from fedunfold.simulation.fused import FusedWalk
from fedunfold.simulation.fused import can_walk as can_launch
from fedunfold.simulation.kernel import Kernel
from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.native import NativeWalk, Rows, read_outer
from fedunfold.simulation.native import can_walk as can_call
from fedunfold.simulation.schedule import Schedule, upload
from fedunfold.simulation.walk import OuterTerms, Walk
from fedunfold.threads import threads_for
from fedunfold.updates import LocalUpdate, sgd

AnyWalk = Walk | FusedWalk | NativeWalk


class Walks:
    """The rows x and labels y of all clients, for walks with minibatches of at most some rows.

    Compiled code may take so many threads.
    """

    def __init__(self, kernel: Kernel, x: Tensor, y: Tensor, most_rows: int, memory_budget: int, threads: int) -> None:
        self._kernel, self._x, self._y = kernel, x, y
        self._most_rows, self._memory_budget, self._threads = most_rows, memory_budget, threads

    def choose(
        self,
        schedule: Schedule,
        step_sizes: Tensor,
        update: LocalUpdate,
        outer: OuterTerms | None,
        *,
        adds_gradients: bool,
        back: bool,
    ) -> AnyWalk:
        """By the model, the device and what is asked. `adds_gradients` asks for sums of the training gradients, and
        `back` for the way back, whose memory is bounded."""
        parts = (schedule, step_sizes, update, outer)
        loss = None if outer is None else outer.loss
        if isinstance(self._kernel, LinearStack) and self._kernel.walks_whole(update, loss) and not adds_gradients:
            whole: FusedWalk | NativeWalk | None = None
            if can_launch(self._kernel, self._most_rows, self._x):
                whole = FusedWalk(self._kernel, self._x, self._y, *parts)
            elif can_call(self._x):
                whole = NativeWalk(self._kernel, self._rows, self._y, *parts, self._threads)
            if whole is not None and (not back or whole.can_walk_back(self._memory_budget)):
                return whole
        return Walk(self._kernel, self._x, self._y, *parts, self._memory_budget)

    @property
    def are_compiled(self) -> bool:
        """Whether nearly all of the work is compiled code's, which has no need of torch's threads."""
        return isinstance(self._kernel, LinearStack) and all(self._kernel.biased) and can_call(self._x)

    def outer_at(self, model: Tensor, rows: np.ndarray, coefficients: Tensor, loss: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w) over some rows at a model that does not move, and its gradient in w."""
        kernel = self._kernel
        if isinstance(kernel, LinearStack) and kernel.walks_whole(sgd(), loss) and can_call(self._x):
            return read_outer(kernel, self._rows, self._y, model, rows, coefficients, self._threads)
        chosen = slice(None) if len(rows) == len(self._y) else upload(rows, self._x.device)
        with threads_for(len(rows) * len(model), self._threads):
            return FixedModel(kernel, model).outer(self._x[chosen], self._y[chosen], coefficients, loss)

    @cached_property
    def _rows(self) -> Rows:
        return Rows.of(self._x)

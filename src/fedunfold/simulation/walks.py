"""Which walk a round takes: compiled code for the whole of it where there is some, else torch step by step."""

from dataclasses import dataclass

from torch import Tensor

from fedunfold.simulation.fused import FusedWalk
from fedunfold.simulation.fused import can_walk as can_launch
from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.native import NativeWalk
from fedunfold.simulation.samples import Samples
from fedunfold.simulation.schedule import Schedule
from fedunfold.simulation.walk import OuterTerms, Walk
from fedunfold.updates import LocalUpdate

AnyWalk = Walk | FusedWalk | NativeWalk


@dataclass(frozen=True)
class Walks:
    """Walks over all clients' samples, with minibatches of at most some rows."""

    samples: Samples
    most_rows: int
    memory_budget: int

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
        kernel, x, y = self.samples.kernel, self.samples.x, self.samples.y
        if isinstance(kernel, LinearStack) and kernel.walks_whole(update, loss) and not adds_gradients:
            whole: FusedWalk | NativeWalk | None = None
            if can_launch(kernel, self.most_rows, x):
                whole = FusedWalk(kernel, x, y, *parts)
            elif self.samples.compiled_stack is not None:
                whole = NativeWalk(kernel, self.samples.rows, y, *parts, self.samples.threads)
            if whole is not None and (not back or whole.can_walk_back(self.memory_budget)):
                return whole
        return Walk(kernel, x, y, *parts, self.memory_budget)

"""Which walk a round takes: compiled code for the whole of it where there is some, else torch step by step."""

from dataclasses import dataclass

from torch import Tensor

from fedunfold.engines.simulation.backends.cpu import CpuTrainer
from fedunfold.engines.simulation.backends.cuda import CudaTrainer
from fedunfold.engines.simulation.backends.cuda import is_supported as can_launch
from fedunfold.engines.simulation.backends.torch.local_training import OuterWeights, TorchTrainer
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.samples import Evaluator
from fedunfold.engines.simulation.schedule import DeviceBatchPlan
from fedunfold.local.optimizers import LocalOptimizer

LocalTrainer = TorchTrainer | CudaTrainer | CpuTrainer


@dataclass(frozen=True)
class TrainerFactory:
    """Walks over all clients' samples, with minibatches of at most some rows."""

    samples: Evaluator
    most_rows: int
    memory_budget: int

    def choose(
        self,
        schedule: DeviceBatchPlan,
        step_sizes: Tensor,
        update: LocalOptimizer,
        outer: OuterWeights | None,
        *,
        adds_gradients: bool,
        back: bool,
    ) -> LocalTrainer:
        """By the model, the device and what is asked. `adds_gradients` asks for sums of the training gradients, and
        `back` for the way back, whose memory is bounded."""
        parts = (schedule, step_sizes, update, outer)
        loss = None if outer is None else outer.loss
        kernel, x, y = self.samples.kernel, self.samples.x, self.samples.y
        if isinstance(kernel, MLPKernel) and kernel.supports_fused(update, loss) and not adds_gradients:
            whole: CudaTrainer | CpuTrainer | None = None
            if can_launch(kernel, self.most_rows, x):
                whole = CudaTrainer(kernel, x, y, *parts)
            elif self.samples.compiled_stack is not None:
                whole = CpuTrainer(kernel, self.samples.rows, y, *parts, self.samples.threads)
            if whole is not None and (not back or whole.supports_backward(self.memory_budget)):
                return whole
        return TorchTrainer(kernel, x, y, *parts, self.memory_budget)

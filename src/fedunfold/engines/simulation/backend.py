"""Which backend trains a round's clients: compiled code for the whole of it where there is some, else torch."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedunfold.core.inputs import Inputs, single
from fedunfold.core.messages import TrainRequest
from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, LocalTrainer, OuterWeights
from fedunfold.engines.simulation.backends.cpu.local_training import CpuEvaluator, CpuTrainer
from fedunfold.engines.simulation.backends.cpu.local_training import is_supported as is_cpu_supported
from fedunfold.engines.simulation.backends.cuda.local_training import CudaTrainer
from fedunfold.engines.simulation.backends.cuda.local_training import is_supported as is_cuda_supported
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel


@dataclass(frozen=True, eq=False)
class Backend:
    """Samples where they are computed on, and what can compute on them.

    Attributes:
        kernel: Gradients of the model.
        inputs: Rows of all clients, one after the other.
        y: Their targets.
        dtype: The precision it computes in.
        threads: How many the CPU may use.
        memory_budget: Bytes that a backward pass may store of one round.
    """

    kernel: Kernel
    inputs: Inputs
    y: Tensor
    dtype: torch.dtype
    threads: int
    memory_budget: int

    @property
    def x(self) -> Tensor:
        """The rows, where they are one tensor."""
        return single(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.y.device

    @cached_property
    def cpu(self) -> CpuEvaluator | None:
        """The samples as compiled code on the CPU reads them, if it knows the kernel."""
        kernel = self.kernel
        if isinstance(kernel, MLPKernel) and all(kernel.biased) and is_cpu_supported(self.x):
            return CpuEvaluator(kernel, self.x, self.y, self.threads)
        return None

    def select_trainer(
        self,
        batches: DeviceBatchPlan,
        step_sizes: Tensor,
        outer: OuterWeights | None,
        request: TrainRequest,
        *,
        backward: bool,
    ) -> LocalTrainer:
        """By the model, the device and what is requested.

        Args:
            batches: The minibatches.
            step_sizes: η_k of every slot.
            outer: How minibatches enter the outer loss.
            request: What was requested of the round, or of several in the same way.
            backward: Whether the backward pass is requested, whose memory is bounded.
        """
        kernel, parts = self.kernel, (self.y, batches, step_sizes, request.optimizer, outer)
        in_steps = sums_gradients(request) or (backward and not request.curvature)
        if isinstance(kernel, MLPKernel) and not in_steps and _is_fused(kernel, request.optimizer, outer):
            whole: CpuTrainer | CudaTrainer | None = None
            if self.x.is_cuda and is_cuda_supported(kernel, batches.rows.shape[2], self.x):
                whole = CudaTrainer(kernel, *parts, self.x)
            elif self.cpu is not None:
                whole = CpuTrainer(kernel, *parts, self.cpu.rows, self.threads)
            if whole is not None and (not backward or whole.supports_backward(self.memory_budget)):
                return whole
        return TorchTrainer(kernel, *parts, self.inputs, self.memory_budget, request.curvature)


def sums_gradients(request: TrainRequest) -> bool:
    """Whether training gradients have to be summed up along the steps, because w_k − w^(t) does not carry them."""
    return "gradients" in request.required_metrics and request.optimizer.fused_mu != 0


def _is_fused(kernel: MLPKernel, optimizer: LocalOptimizer, outer: OuterWeights | None) -> bool:
    """Whether there is compiled code for a whole round, on a CPU or a GPU."""
    is_training_loss = outer is None or outer.loss.is_training_loss
    return optimizer.fused_mu is not None and is_training_loss and all(kernel.biased)

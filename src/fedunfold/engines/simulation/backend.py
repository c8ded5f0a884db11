"""Which backend trains a round's clients: compiled code for the whole of it where there is some, else torch."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedunfold.core.messages import TrainRequest
from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, LocalTrainer, OuterWeights
from fedunfold.engines.simulation.backends.cpu.local_training import CpuEvaluator, CpuTrainer
from fedunfold.engines.simulation.backends.cpu.local_training import is_supported as is_cpu_supported
from fedunfold.engines.simulation.backends.cuda.local_training import CudaTrainer
from fedunfold.engines.simulation.backends.cuda.local_training import is_supported as is_cuda_supported
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.engines.simulation.batching import MemorySamples, Samples
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel


@dataclass(frozen=True, eq=False)
class Backend:
    """Samples where they are computed on, and what can compute on them.

    Attributes:
        kernel: Gradients of the model.
        samples: Those of all clients, one client after the other.
        device: Where it computes.
        dtype: In which precision.
        threads: How many the CPU may use.
        memory_budget: Bytes that a backward pass may store of one round.
    """

    kernel: Kernel
    samples: Samples
    device: torch.device
    dtype: torch.dtype
    threads: int
    memory_budget: int

    @property
    def in_memory(self) -> Tensor | None:
        """All rows, where they are one tensor in memory, as compiled code reads them."""
        samples = self.samples
        return samples.inputs if isinstance(samples, MemorySamples) and isinstance(samples.inputs, Tensor) else None

    @cached_property
    def cpu(self) -> CpuEvaluator | None:
        """The samples as compiled code on the CPU reads them, if it knows the kernel."""
        kernel, rows = self.kernel, self.in_memory
        if isinstance(kernel, MLPKernel) and rows is not None and all(kernel.biased) and is_cpu_supported(rows):
            return CpuEvaluator(kernel, rows, self.samples.y, self.threads)
        return None

    def select_trainer(
        self,
        batches: DeviceBatchPlan,
        step_sizes: Tensor,
        outer: OuterWeights | None,
        request: TrainRequest,
        *,
        backward: bool,
        corrections: Tensor | None = None,
    ) -> LocalTrainer:
        """By the model, the device and what is requested.

        Args:
            batches: The minibatches.
            step_sizes: η_k of every slot.
            outer: How minibatches enter the outer loss.
            request: What was requested of the round, or of several in the same way.
            backward: Whether the backward pass is requested, whose memory is bounded.
            corrections: v_k of every slot, where the local optimiser has control variates.
        """
        kernel, rows = self.kernel, self.in_memory
        parts = self.samples.y, batches, step_sizes, request.optimizer, outer
        in_steps = sums_gradients(request) or (backward and not request.curvature)
        is_fused = isinstance(kernel, MLPKernel) and _is_fused(kernel, request.optimizer, outer)
        if isinstance(kernel, MLPKernel) and rows is not None and is_fused and not in_steps:
            whole: CpuTrainer | CudaTrainer | None = None
            if rows.is_cuda and is_cuda_supported(kernel, batches.rows.shape[2], rows):
                whole = CudaTrainer(kernel, *parts, rows)
            elif self.cpu is not None:
                whole = CpuTrainer(kernel, *parts, self.cpu.rows, self.threads)
            if whole is not None and (not backward or whole.supports_backward(self.memory_budget)):
                return whole
        return TorchTrainer(kernel, *parts, self.samples, self.memory_budget, request.curvature, corrections)


def sums_gradients(request: TrainRequest) -> bool:
    """Whether training gradients have to be summed up along the steps, because w_k − w^(t) does not carry them."""
    return "gradients" in request.required_metrics and request.optimizer.fused_mu != 0


def _is_fused(kernel: MLPKernel, optimizer: LocalOptimizer, outer: OuterWeights | None) -> bool:
    """Whether there is compiled code for a whole round, on a CPU or a GPU."""
    is_training_loss = outer is None or outer.loss.is_training_loss
    return optimizer.fused_mu is not None and is_training_loss and all(kernel.biased)


def default_budget(device: torch.device) -> int:
    """Bytes of iterates that the exact adjoint may store of one round: a quarter of a GPU's memory, or 768 MiB."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory // 4)
    return 768 * 2**20

"""Which backend trains a round's clients: compiled code for the whole of it where there is some, else torch."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedunfold.core.parts import LocalOptimizer, OuterLoss
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, LocalTrainer, OuterWeights
from fedunfold.engines.simulation.backends.cpu import CpuTrainer, SparseRows
from fedunfold.engines.simulation.backends.cpu import is_supported as is_cpu_supported
from fedunfold.engines.simulation.backends.cuda import CudaTrainer
from fedunfold.engines.simulation.backends.cuda import is_supported as is_cuda_supported
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel


@dataclass(frozen=True, eq=False)
class Backend:
    """Samples where they are computed on, and what can compute on them.

    Attributes:
        kernel: Gradients of the model.
        x: Rows of all clients, one after the other.
        y: Their labels.
        threads: How many the CPU may use.
        memory_budget: Bytes that a backward pass may store of one round.
    """

    kernel: Kernel
    x: Tensor
    y: Tensor
    threads: int
    memory_budget: int

    @cached_property
    def cpu_kernel(self) -> MLPKernel | None:
        """The kernel, if compiled code on the CPU knows it."""
        kernel = self.kernel
        return kernel if isinstance(kernel, MLPKernel) and all(kernel.biased) and is_cpu_supported(self.x) else None

    @cached_property
    def rows(self) -> SparseRows:
        """x as compiled code reads it, which relies on labels being classes."""
        classes = self.kernel.layout.shapes[-1].numel()
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < classes:
            raise ValueError(f"there are labels other than 0 to {classes - 1}.")
        return SparseRows.from_dense(self.x)

    def select_trainer(
        self,
        batches: DeviceBatchPlan,
        step_sizes: Tensor,
        optimizer: LocalOptimizer,
        outer: OuterWeights | None,
        *,
        sums_gradients: bool,
        backward: bool,
        curvature: bool,
    ) -> LocalTrainer:
        """By the model, the device and what is requested.

        Args:
            batches: The minibatches.
            step_sizes: η_k of every slot.
            optimizer: The clients' optimiser.
            outer: How minibatches enter the outer loss.
            sums_gradients: Whether sums of the training gradients are requested.
            backward: Whether the backward pass is, whose memory is bounded.
            curvature: Whether that counts the curvature of the training loss.
        """
        parts = (batches, step_sizes, optimizer, outer)
        kernel = self.kernel
        in_steps = sums_gradients or (backward and not curvature)
        if isinstance(kernel, MLPKernel) and not in_steps and _is_fused(kernel, optimizer, outer):
            whole: CpuTrainer | CudaTrainer | None = None
            if self.x.is_cuda and is_cuda_supported(kernel, batches.rows.shape[2], self.x):
                whole = CudaTrainer(kernel, self.x, self.y, *parts)
            elif self.cpu_kernel is not None:
                whole = CpuTrainer(kernel, self.rows, self.y, *parts, self.threads)
            if whole is not None and (not backward or whole.supports_backward(self.memory_budget)):
                return whole
        return TorchTrainer(kernel, self.x, self.y, *parts, self.memory_budget, curvature)


def _is_fused(kernel: MLPKernel, optimizer: LocalOptimizer, outer: OuterWeights | None) -> bool:
    """Whether there is compiled code for a whole round, on a CPU or a GPU."""
    loss: OuterLoss | None = None if outer is None else outer.loss
    return optimizer.fused_mu is not None and (loss is None or loss.is_cross_entropy) and all(kernel.biased)

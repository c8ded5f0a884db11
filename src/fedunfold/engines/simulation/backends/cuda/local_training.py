"""Local training of a cohort in one launch, where the model and the device allow it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.engines.simulation.backends.base import LocalTrainer, StepSums
from fedunfold.engines.simulation.backends.cuda import jit
from fedunfold.engines.simulation.batching import upload
from fedunfold.engines.simulation.kernels.mlp import MLPKernel


def is_supported(kernel: MLPKernel, rows: int, x: Tensor) -> bool:
    """Whether a round can be one launch.

    Args:
        kernel: The stack of linear layers.
        rows: Samples of a minibatch.
        x: The data, on the device and in the type of the computation.
    """
    single = x.device.type == "cuda" and x.dtype == torch.float32
    return single and _config(kernel, rows).fits(jit.shared_memory(x.device))


@dataclass(frozen=True)
class CudaTrainer(LocalTrainer):
    """What `TorchTrainer` does, for stacks of linear layers on a GPU.

    Attributes:
        kernel: The stack of linear layers.
        x: The data of all clients.
    """

    kernel: MLPKernel
    x: Tensor

    def forward(self, start: Tensor, sums: StepSums) -> Tensor:
        """Train every slot in one launch."""
        models = torch.empty_like(start, memory_format=torch.contiguous_format)
        self._launch(start, models, sums)
        return models

    def backward(self, start: Tensor, adjoint: Tensor) -> Tensor:
        """Train every slot again, saving its activations, and differentiate through it in a second launch."""
        saved = start.new_empty(len(self.batches.active), len(start), self._config.saved_per_step)
        self._launch(start, saved, StepSums(start.new_empty(2, len(start))), saves_activations=True)
        adjoint = adjoint.clone(memory_format=torch.contiguous_format)
        launch = jit.compile_kernel("backward", self._config, self.x.device)
        launch(len(start), [*self._inputs, saved, adjoint, len(start), int(self.path_outer is not None)])
        return adjoint

    def supports_backward(self, memory_budget: int) -> bool:
        """Whether there is a kernel for the backward pass, and what it saves is within the budget.

        Args:
            memory_budget: Bytes.
        """
        steps, slots = len(self.batches.active), len(self.batches.order)
        saved = steps * slots * self._config.saved_per_step * self.x.element_size()
        return self._config.fits_backward(jit.shared_memory(self.x.device)) and saved <= memory_budget

    def _launch(self, start: Tensor, to: Tensor, sums: StepSums, *, saves_activations: bool = False) -> None:
        """Train; `to` gets the trained model of every slot, or what every step saves."""
        slots, start, gradients = len(start), start.contiguous(), sums.outer_gradients
        config = replace(self._config, sums_gradients=gradients is not None, saves_activations=saves_activations)
        on_tensor_cores = not saves_activations and self._uses_tensor_cores(config, slots)
        name: jit.Name = "forward_tensor_cores" if on_tensor_cores else "forward"
        losses = start.new_empty(2, slots, config.loss_sums(name))
        sums_to, scratch = start, start  # where there is nothing to sum up, neither is read
        if gradients is not None:
            sums_to, scratch = gradients, start.new_zeros(slots * config.scratch)
        arguments = [*self._inputs, to, start, *losses, sums_to, scratch, slots, float(self.optimizer.fused_mu or 0)]
        jit.compile_kernel(name, config, self.x.device)(slots, arguments)
        torch.sum(losses, 2, out=sums.losses)
        if self.path_outer is None:
            sums.losses[1] = 0

    def _uses_tensor_cores(self, config: jit.KernelConfig, slots: int) -> bool:
        """Eight blocks train a slot sooner than two, as long as there is room for all slots at once."""
        crowded = slots * jit.CLUSTER_BLOCKS > jit.multiprocessors(self.x.device)
        return crowded and self.x.numel() < 2**32 and config.fits_tensor_cores(jit.shared_memory(self.x.device))

    @cached_property
    def _config(self) -> jit.KernelConfig:
        plain = _config(self.kernel, self.batches.rows.shape[2])
        balanced = self.outer is not None and self.outer.class_weights is not None
        return replace(plain, prox=bool(self.optimizer.fused_mu), balanced=balanced)

    @cached_property
    def _inputs(self) -> tuple[Tensor, ...]:
        """Data, minibatches and coefficients."""
        outer, ones = self.outer, self.step_sizes
        factors = ones if outer is None else outer.factors
        class_weights = ones if outer is None or outer.class_weights is None else outer.class_weights
        batches = self.batches
        steps = upload((batches.counts > 0).sum(0).astype(np.int32), self.x.device)
        return self.x, self.y, batches.rows, batches.means, steps, self.step_sizes, factors, class_weights


def _config(kernel: MLPKernel, rows: int) -> jit.KernelConfig:
    return jit.KernelConfig(kernel.sizes[0], kernel.sizes[1:], rows)

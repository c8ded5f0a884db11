"""Gradients and Hessian-vector products of many copies of a model at once; which kernel a model takes.

That is decided by its layers alone, so that the same model always takes the same path.
"""

import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.core.params import seeded
from fedunfold.core.task import Task
from fedunfold.data.arrays import Inputs, call_model, tensors
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.kernels.module import ModuleKernel


def choose_kernel(module: nn.Module, x: Inputs, y: Tensor, data: FederatedData, batch_size: int) -> Kernel:
    """The batched kernel for a stack of linear layers, the general one for anything else; tried on rows (x, y)."""
    _check_trainable(module, x, y, data.task)
    batched = is_batched(module, data.task)
    kernel: Kernel = MLPKernel(module, data.task) if batched else ModuleKernel(module, data.task, x)
    for key, size in zip(data.keys, data.sizes, strict=True):
        if (size % batch_size or batch_size) < kernel.min_batch_size:
            raise InputError(
                f"client '{key}': its last minibatch is a single row, on which the model's normalisation cannot be "
                f"trained; choose another batch size than {batch_size}."
            )
    return kernel


def is_batched(module: nn.Module, task: Task) -> bool:
    """Whether the batched kernel knows both the model and its loss."""
    return task.is_cross_entropy and MLPKernel.fits(module)


def kernel_name(environment: Environment) -> str:
    """The kernel of an environment's own model."""
    data = environment.load()
    build = model_factory(environment.model, data.features, data.task.num_outputs)
    module = seeded(build, environment.seed, "shape")
    return (MLPKernel if is_batched(module, data.task) else ModuleKernel).__name__


def _check_trainable(module: nn.Module, x: Inputs, y: Tensor, task: Task) -> None:
    """Refuse what is no model of the task on rows such as (x, y)."""
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameters to train.")
    module.eval()
    try:
        with torch.no_grad():
            first, second = call_model(module, x), call_model(module, x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason, shapes = (str(error).splitlines() or [type(error).__name__])[0], [list(t.shape[1:]) for t in tensors(x)]
        raise InputError(f"the model cannot read rows of shape {', '.join(map(str, shapes))}: {reason}") from error
    if not torch.equal(task.check_outputs(first, y), task.check_outputs(second, y)):
        raise InputError("the model gives other outputs for the same rows each time, even when it is not trained.")

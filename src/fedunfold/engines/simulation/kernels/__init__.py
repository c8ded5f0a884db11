"""Gradients and Hessian-vector products of many copies of a model at once; which kernel a model takes.

That is decided by its layers alone, so that the same model always takes the same path.
"""

import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.core.params import seeded
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.kernels.module import ModuleKernel


def choose_kernel(module: nn.Module, x: Tensor, data: FederatedData, batch_size: int) -> Kernel:
    """The batched kernel for a stack of linear layers, the general one for anything else; tried on rows x."""
    _check_trainable(module, x, data.classes)
    kernel: Kernel = MLPKernel(module) if MLPKernel.fits(module) else ModuleKernel(module, x)
    for key, size in zip(data.keys, data.sizes, strict=True):
        if (size % batch_size or batch_size) < kernel.min_batch_size:
            raise InputError(
                f"client '{key}': its last minibatch is a single row, on which the model's normalisation cannot be "
                f"trained; choose another batch size than {batch_size}."
            )
    return kernel


def kernel_name(environment: Environment) -> str:
    """The kernel of an environment's own model."""
    data = environment.load()
    build = model_factory(environment.model, tuple(data.x.shape[1:]), data.classes)
    return (MLPKernel if MLPKernel.fits(seeded(build, environment.seed, "shape")) else ModuleKernel).__name__


def _check_trainable(module: nn.Module, x: Tensor, classes: int) -> None:
    """Refuse what is no classifier of rows such as x."""
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameters to train.")
    module.eval()
    try:
        with torch.no_grad():
            first, second = module(x), module(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the model cannot read rows of shape {list(x.shape[1:])}: {reason}") from error
    if not isinstance(first, Tensor) or first.shape != (len(x), classes):
        given = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise InputError(
            f"the model gives {given} for {len(x)} rows, where logits of shape {[len(x), classes]} are needed."
        )
    if not torch.equal(first, second):
        raise InputError("the model gives other logits for the same rows each time, even when it is not trained.")

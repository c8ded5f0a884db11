"""Trainable parameters and running statistics of a module, and one vector of all of them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedunfold.core import rng

ModelFactory = Callable[[], nn.Module]


def seeded(build: ModelFactory, seed: int, run: str) -> nn.Module:
    """The model that a run starts from: built under a seed of its own, leaving torch's generator alone."""
    drawn = rng.integer(seed, "model", run)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(drawn)
        if torch.cuda.is_available():  # where it is not, torch would note the seed down, and more of them every time
            torch.cuda.manual_seed_all(drawn)
        return build()


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of normalisation layers, by name: no gradient moves them, training does."""
    found: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            where = f"{name}." if name else ""
            found |= {f"{where}{part}": getattr(layer, part) for part in ("running_mean", "running_var")}
    return found


def flat_model(module: nn.Module) -> Tensor:
    """What clients change of a module, as one vector [d]: parameters, and after them running statistics."""
    parts = [*trainable(module).values(), *statistics(module).values()]
    return torch.cat([part.detach().flatten() for part in parts])


@torch.no_grad()
def set_flat_model(module: nn.Module, model: Tensor) -> None:
    """Put a vector [d] back into a module."""
    parts = [*trainable(module).values(), *statistics(module).values()]
    for part, values in zip(parts, torch.split(model, [part.numel() for part in parts]), strict=True):
        part.copy_(values.view(part.shape))

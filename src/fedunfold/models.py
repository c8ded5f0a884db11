"""Classifiers an environment can name. In Python any function that builds a `torch.nn.Module` does."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedunfold import randomness
from fedunfold.environments import ModelSpec

ModelFactory = Callable[[], nn.Module]


def model_factory(spec: ModelSpec, features: tuple[int, ...], classes: int) -> ModelFactory:
    """A function that builds a fresh multilayer perceptron; without hidden layers, a linear classifier."""
    widths = [math.prod(features), *spec.hidden, classes]

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(wide, narrow))
        return nn.Sequential(*layers)

    return build


def seeded(build: ModelFactory, seed: int, run: str) -> nn.Module:
    """The model that a run starts from: built under a seed of its own, leaving torch's generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.integer(seed, "model", run))
        return build()


def flat_parameters(module: nn.Module) -> Tensor:
    """What is trained of a module, as one vector [d]."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])

"""Classifiers an environment can name. In Python any function that builds a `torch.nn.Module` does."""

import itertools
import math
from collections.abc import Callable

from torch import nn

from fedunfold.environments import ModelSpec


def model_factory(spec: ModelSpec, features: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """A function that builds a fresh multilayer perceptron; without hidden layers, a linear classifier."""
    widths = [math.prod(features), *spec.hidden, classes]

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(wide, narrow))
        return nn.Sequential(*layers)

    return build

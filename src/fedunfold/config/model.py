"""The model an environment names. In Python any function that builds a `torch.nn.Module` does."""

import itertools
import math

from torch import nn

from fedunfold.config.schema import ModelSpec
from fedunfold.core.params import ModelFactory
from fedunfold.io.limits import PARAMETERS


def model_factory(spec: ModelSpec, features: tuple[int, ...], classes: int) -> ModelFactory:
    """A function that builds a fresh multilayer perceptron; without hidden layers, a linear classifier."""
    widths = [math.prod(features), *spec.hidden, classes]
    PARAMETERS.check(sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths)), "field model.hidden: ")

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(wide, narrow))
        return nn.Sequential(*layers)

    return build

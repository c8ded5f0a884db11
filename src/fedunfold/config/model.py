"""Classifiers an environment can name. In Python any function that builds a `torch.nn.Module` does."""

import itertools
import math
from typing import Annotated, Literal

from pydantic import AfterValidator
from torch import nn

from fedunfold.core.params import ModelFactory
from fedunfold.core.settings import Count, Settings
from fedunfold.io.limits import LAYERS, PARAMETERS, WIDTH

Width = Annotated[Count, AfterValidator(WIDTH.check)]


def _not_too_deep(hidden: tuple[int, ...]) -> tuple[int, ...]:
    LAYERS.check(len(hidden))
    return hidden


class ModelSpec(Settings):
    """A multilayer perceptron: linear layers with ReLU between.

    Attributes:
        kind: "mlp", the only kind so far.
        hidden: The widths of the hidden layers; without any it is a linear classifier.

    >>> ModelSpec(hidden=(128, 128)).hidden
    (128, 128)
    """

    kind: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Width, ...], AfterValidator(_not_too_deep)] = ()


def model_factory(spec: ModelSpec, features: tuple[int, ...], classes: int) -> ModelFactory:
    """Make a function that builds the model a specification describes.

    Args:
        spec: The model.
        features: The shape of a sample.
        classes: How many classes there are.

    Returns:
        A function without arguments; each call builds a fresh model.

    Raises:
        LimitError: The model has more parameters than allowed.
    """
    widths = [math.prod(features), *spec.hidden, classes]
    PARAMETERS.check(sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths)), "field model.hidden: ")

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(wide, narrow))
        return nn.Sequential(*layers)

    return build

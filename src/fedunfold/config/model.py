"""Models an environment can name. In Python any function that builds a `torch.nn.Module` does."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn

from fedunfold.core.errors import InputError
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
        kind: "mlp".
        hidden: The widths of the hidden layers; without any it is a linear model.

    >>> ModelSpec(hidden=(128, 128)).hidden
    (128, 128)
    """

    kind: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Width, ...], AfterValidator(_not_too_deep)] = ()


class GruSpec(Settings):
    """A recurrent network over token ids: an embedding, gated recurrent layers, and a linear layer at every token.

    Ids [B, S] become logits [B, S, V]; those of a token depend on it and the ones before it.

    Attributes:
        kind: "gru".
        embedding: The width of the embedding.
        hidden: The widths of the recurrent layers, at least one.

    Reference: Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder.

    >>> GruSpec(embedding=8, hidden=(128,)).hidden
    (128,)
    """

    kind: Literal["gru"] = "gru"
    embedding: Width = 16
    hidden: Annotated[tuple[Width, ...], Field(min_length=1), AfterValidator(_not_too_deep)] = (128,)


def _mlp_unless_named(given: object) -> object:
    """A table without a kind describes a perceptron."""
    return {"kind": "mlp", **given} if isinstance(given, Mapping) else given


Model = Annotated[ModelSpec | GruSpec, Field(discriminator="kind"), BeforeValidator(_mlp_unless_named)]
"""The models, told apart by their kind."""


class Gru(nn.Module):
    """The network that a `GruSpec` describes.

    Args:
        vocabulary: V.
        embedding: The width of the embedding.
        hidden: The widths of the recurrent layers.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = itertools.pairwise((embedding, *hidden))
        self.layers = nn.ModuleList(nn.GRU(wide, narrow, batch_first=True) for wide, narrow in widths)
        self.output = nn.Linear(hidden[-1], vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of ids [B, S]."""
        states: Tensor = self.embedding(ids)
        for layer in self.layers:
            states, _ = layer(states)
        logits: Tensor = self.output(states)
        return logits


def model_factory(spec: Model, features: tuple[int, ...], classes: int) -> ModelFactory:
    """Make a function that builds the model a specification describes.

    Args:
        spec: The model.
        features: The shape of a sample.
        classes: How many outputs there are: classes, or tokens.

    Returns:
        A function without arguments; each call builds a fresh model.

    Raises:
        InputError: The model reads sequences of token ids, and a sample is none.
        LimitError: The model has more parameters than allowed.
    """
    return _gru(spec, features, classes) if isinstance(spec, GruSpec) else _mlp(spec, features, classes)


def _mlp(spec: ModelSpec, features: tuple[int, ...], classes: int) -> ModelFactory:
    """Builds a perceptron over flattened samples."""
    widths = [math.prod(features), *spec.hidden, classes]
    PARAMETERS.check(sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths)), "field model.hidden: ")

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(wide, narrow))
        return nn.Sequential(*layers)

    return build


def _gru(spec: GruSpec, features: tuple[int, ...], vocabulary: int) -> ModelFactory:
    """Builds a recurrent network whose tokens are those it predicts."""
    if len(features) != 1:
        raise InputError(f"field model.kind: gru reads rows of token ids, [length], not of shape {list(features)}")
    recurrent = sum(
        3 * narrow * (wide + narrow + 2) for wide, narrow in itertools.pairwise((spec.embedding, *spec.hidden))
    )
    PARAMETERS.check(vocabulary * (spec.embedding + spec.hidden[-1] + 1) + recurrent, "field model.hidden: ")
    return lambda: Gru(vocabulary, spec.embedding, spec.hidden)

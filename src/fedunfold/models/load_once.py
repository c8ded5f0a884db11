"""A model that is loaded once, and of which every run initialises anew only what it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fedunfold.core.errors import InputError
from fedunfold.core.params import ModelFactory, copy_model


def reset_trainable(module: nn.Module) -> None:
    """Initialise every layer with trainable parameters by its own `reset_parameters`.

    Raises:
        InputError: A layer has none.
    """
    for name, layer in module.named_modules():
        if not any(param.requires_grad for param in layer.parameters(recurse=False)):
            continue
        reset: Any = getattr(layer, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"layer '{name}' ({type(layer).__name__}) has no reset_parameters to initialise it for a run; "
                "give load_once() a function `initialize`."
            )
        reset()


@dataclass(frozen=True)
class LoadOnce:
    """A function that builds a model, called once: copies share its frozen parameters.

    Use it where building is expensive, as with a pretrained base. What is trainable is initialised anew for every run,
    under the run's seed.

    Attributes:
        build: Loads the module, with `requires_grad=False` on all that stays as it is.
        initialize: Gives the trainable parameters of a module their first values; by default every layer's
            `reset_parameters`. Pass `lambda module: None` where training starts from the loaded values.

    >>> import torch
    >>> def load():
    ...     return nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.ReLU(), nn.Linear(32, 10))
    >>> model = LoadOnce(load)
    >>> first, second = model(), model()
    >>> torch.equal(first[0].weight, second[0].weight), torch.equal(first[2].weight, second[2].weight)
    (True, False)
    """

    build: ModelFactory
    initialize: Callable[[nn.Module], None] = reset_trainable

    def __call__(self) -> nn.Module:
        """A fresh model around the same frozen parameters."""
        module = copy_model(self._loaded)
        self.initialize(module)
        return module

    @cached_property
    def _loaded(self) -> nn.Module:
        loaded: object = self.build()
        if not isinstance(loaded, nn.Module):
            raise InputError(f"the function `build` must build a torch.nn.Module, not {type(loaded).__name__}.")
        return loaded

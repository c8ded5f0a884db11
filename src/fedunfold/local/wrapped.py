"""Local optimisers around another one."""

import inspect
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State
from fedunfold.local.sgd import SGD


@dataclass(frozen=True)
class Wrapped(LocalOptimizer):
    """A local optimiser that trains by another one, and has its settings beside its own.

    Attributes:
        base: The optimiser that clients train by.
    """

    prefix: ClassVar[str]
    base: LocalOptimizer = field(default_factory=SGD)

    @property
    def name(self) -> str:  # type: ignore[override]  # of an instance, because it has the base's name in it
        return f"{self.prefix}-{self.base.name}"

    def describe(self) -> dict[str, Any]:
        own = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "base"}
        return self.base.describe() | own | {"name": self.name}

    def init(self, params: Tensor) -> State:
        return self.base.init(params)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return self.base.step(params, gradient, state, lr, anchor)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        raise InputError(f"{self.name}: its updates are no weighted sums of gradients; choose sgd, prox or momentum.")


def register_around(wrapper: type[Wrapped], *bases: str) -> None:
    """Give a wrapper around others their names and settings: ``clipped-adamw:max_norm=1,weight_decay=0.1``."""
    own = list(inspect.signature(wrapper).parameters.values())[1:]
    for base in bases:
        factory = LOCAL_OPTIMIZERS.factory(base)
        LOCAL_OPTIMIZERS.register(f"{wrapper.prefix}-{base}")(_around(wrapper, factory, own))


def _around(wrapper: type[Wrapped], factory: Any, own: list[inspect.Parameter]) -> Any:
    def make(**settings: Any) -> Wrapped:
        mine = {setting.name: settings.pop(setting.name) for setting in own if setting.name in settings}
        return wrapper(factory(**settings), **mine)

    theirs = inspect.signature(factory).parameters.values()
    accepted = [setting.replace(kind=inspect.Parameter.KEYWORD_ONLY) for setting in (*theirs, *own)]
    make.__signature__ = inspect.Signature(accepted)  # type: ignore[attr-defined]  # what `inspect.signature` looks up
    return make

"""What one client is told and what it answers, in plain values: no network here."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedunfold.config.schema import BatchSize
from fedunfold.core.errors import InputError
from fedunfold.core.federation import Need
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.core.task import OuterName
from fedunfold.io.limits import EPOCHS, ROUNDS
from fedunfold.local.optimizers import LocalOptimizer

MessageType = Literal["register", "train", "backprop", "outer", "evaluate", "measure", "inner"]
SumStage = Literal["advertise", "share", "mask", "unmask"]
Arrays = Mapping[str, Tensor]


class UpdateRule(Settings):
    """A `LocalOptimizer`, checked on arrival."""

    name: str
    mu: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    normalise_steps: bool = False
    accumulate: bool = False

    @classmethod
    def of(cls, update: LocalOptimizer) -> "UpdateRule":
        return cls(**asdict(update))

    def rule(self) -> LocalOptimizer:
        return LocalOptimizer(**self.model_dump())


class TrainInstruction(Settings):
    """Everything a client needs for one round beside its data and the model: it keeps nothing in between.

    `trains` is False for a client that counts as absent and only tells its losses at w^(t). `inside` and `after`
    are its scales of the update, which depend on who else is there.
    """

    run: str
    round: Annotated[Natural, AfterValidator(ROUNDS.check)]
    seed: Natural
    lr: float = Field(gt=0)
    batch_size: BatchSize
    epochs: Annotated[Count, AfterValidator(EPOCHS.check)]
    update: UpdateRule
    needs: tuple[Need, ...] = ()
    outer: OuterName | None = None
    path_gradient: bool = False
    trains: bool = True
    inside: float = 1.0
    after: float = 1.0


@dataclass(frozen=True)
class ClientDescription:
    """What a client says of itself once: its key, its samples by class, and the shape of a row."""

    key: str
    label_counts: tuple[int, ...]
    features: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.label_counts)


@dataclass(frozen=True)
class ClientReply:
    """A client's answer: numbers and arrays by name."""

    metrics: Mapping[str, float]
    arrays: Arrays


def checked(reply: ClientReply, expected: Mapping[str, Tensor], numbers: set[str], unasked: set[str]) -> ClientReply:
    """The reply, if it has exactly these arrays, like the expected ones, and these numbers, all of them possible.

    NaN is let through in `unasked` numbers alone.
    """
    if set(reply.arrays) != set(expected):
        raise InputError(f"has arrays {_names(reply.arrays)} in place of {_names(expected)}")
    for name, like in expected.items():
        array = reply.arrays[name]
        if array.shape != like.shape or array.dtype != like.dtype:
            raise InputError(f"has '{name}' of shape {list(array.shape)} and type {array.dtype}, not as the model")
        # Also where its numbers are too large to be added up.
        if like.is_floating_point() and not bool(torch.isfinite(array.norm())):
            raise InputError(f"has a NaN, infinite or far too large value in '{name}'")
    if set(reply.metrics) != numbers:
        raise InputError(f"has numbers {_names(reply.metrics)} in place of {_names(numbers)}")
    for name, value in reply.metrics.items():
        if not (possible(name, value) or (name in unasked and math.isnan(value))):
            raise InputError(f"has {value} for '{name}'")
    return reply


def possible(name: str, value: float) -> bool:
    """Whether a client can mean it: losses are not negative, an accuracy lies between 0 and 1, all are finite."""
    lowest = -math.inf if name == "inner" else 0
    return math.isfinite(value) and lowest <= value <= (1 if name == "accuracy" else math.inf)


def _names(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"

"""What an environment over data of a program is given beside the data."""

from collections.abc import Collection, Mapping
from typing import Required, TypedDict, TypeVar

from fedunfold.config.clock import Clock
from fedunfold.config.fields import Epochs
from fedunfold.config.model import Model
from fedunfold.core.errors import InputError

Value = TypeVar("Value")


class TrainingSettings(TypedDict, total=False):
    """Settings of `Environment.from_arrays` and `Environment.from_datasets`.

    Attributes:
        rounds: Rounds T.
        batch_size: Samples in a local step.
        lr: The clients' local learning rate η.
        epochs: Epochs of local training in a round, for all clients or by key; 1 by default.
        participation_probability: How likely clients take part in a round, for all or by key; 1 by default.
        model: The model, or the widths of its hidden layers; by default linear.
        clients_per_round: How many clients are drawn each round; by default all of them.
        client_sampler: How they are drawn; by default "uniform".
        clock: How long clients take; by default simulated runs have no time.
        seed: Randomness of training; 0 by default.
        name: What the environment is called.
        description: What it is, for people.
    """

    rounds: Required[int]
    batch_size: Required[int]
    lr: Required[float]
    epochs: Epochs | Mapping[str, Epochs]
    participation_probability: float | Mapping[str, float]
    model: Model | tuple[int, ...]
    clients_per_round: int | None
    client_sampler: str
    clock: Clock | None
    seed: int
    name: str
    description: str


def by_key(field: str, value: Value | Mapping[str, Value], keys: Collection[str]) -> Mapping[str, Value]:
    """A value for every client."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(keys, value)
    if odd := sorted(value.keys() ^ set(keys)):
        state = "names no client" if odd[0] in value else "is missing"
        raise InputError(f"field {field}: {odd[0]} {state}; give one entry for each client")
    return value

"""What is heterogeneous about a federation, in one validated description that fits in a TOML file."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from numpy.typing import ArrayLike
from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    field_validator,
    model_validator,
)

from fedunfold.core.errors import InputError
from fedunfold.core.participation import epochs_at
from fedunfold.core.parts import CLIENT_SAMPLERS
from fedunfold.core.settings import Count, Natural, Settings, shown
from fedunfold.data.config import (
    DataSource,
    FeaturesSource,
    GivenPartition,
    MemorySource,
    NpzSource,
    Partition,
    check_division,
    divide,
    located,
)
from fedunfold.data.federated import FederatedData
from fedunfold.io.atomic import is_plain_file, parse_toml, read_text
from fedunfold.io.limits import BATCH, CLIENTS, ENVIRONMENT_BYTES, EPOCHS, LAYERS, ROUNDS, WIDTH

KEY = re.compile(r"[A-Za-z0-9._-]{1,64}")
Value = TypeVar("Value")


def _valid_epochs(value: Any) -> int | tuple[int, ...]:
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries or any(type(entry) is not int or entry < 1 for entry in entries):
        raise ValueError(f"must be an integer of at least 1, or one such a round, got {shown(value)}")
    EPOCHS.check(max(entries))
    return tuple(entries) if isinstance(value, list | tuple) else entries[0]


Epochs = Annotated[
    int | tuple[int, ...],
    PlainValidator(_valid_epochs),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value),
]


Rounds = Annotated[Count, AfterValidator(ROUNDS.check)]
BatchSize = Annotated[Count, AfterValidator(BATCH.check)]


class Client(Settings):
    """One participant: how many epochs it trains a round, and how often it is reachable.

    >>> Client(key="hospital-a", epochs=2, participation_probability=0.9)
    Client(key='hospital-a', epochs=2, participation_probability=0.9)
    """

    key: str
    epochs: Epochs = 1
    participation_probability: float = Field(default=1.0, ge=0, le=1)

    @field_validator("key")
    @classmethod
    def _readable_key(cls, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or underscores, got {key!r}")
        return key


class ModelSpec(Settings):
    """A stack of linear layers with ReLU between; no hidden layer makes it a linear classifier.

    >>> ModelSpec(hidden=(128, 128)).hidden
    (128, 128)
    """

    kind: Literal["mlp"] = "mlp"
    hidden: tuple[Annotated[Count, AfterValidator(WIDTH.check)], ...] = ()

    @field_validator("hidden")
    @classmethod
    def _not_too_deep(cls, hidden: tuple[int, ...]) -> tuple[int, ...]:
        LAYERS.check(len(hidden))
        return hidden


class OuterSchedule(Settings):
    """Outer iterations M and Adam's step size, as a publication states them for an environment."""

    iterations: Count
    lr: float = Field(gt=0, lt=1)


class Environment(Settings):
    """Clients, their data, the model and the schedule of local training.

    `clients_per_round` clients are drawn each round (all of them when None). In `clients`, an entry given as a table
    may carry ``count = n`` and stands for n clients key-0 … key-(n−1). `paper_schedule` is the slow outer schedule.
    `class_names` are in the order of the class numbers, and fix how many classes there are.

    >>> import fedunfold as fu
    >>> env = fu.environment("digits-label-skew").replace(rounds=5)
    >>> env.rounds, env.load().keys
    (5, ('site-a', 'site-b', 'site-c', 'site-d', 'site-e'))
    """

    name: str = Field(min_length=1, max_length=200)
    description: str = ""
    rounds: Rounds
    batch_size: BatchSize
    lr: float = Field(gt=0)
    seed: Natural = 0
    clients_per_round: Count | None = None
    client_sampler: str = "uniform"
    class_names: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    paper_schedule: OuterSchedule = OuterSchedule(iterations=400, lr=0.001)
    model: ModelSpec = ModelSpec()
    data: DataSource
    partition: Partition
    clients: tuple[Client, ...]

    _folder: Path = PrivateAttr(default=Path())

    @field_validator("name")
    @classmethod
    def _printable_name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"must be one line that can be printed, got {shown(name)}")
        return name

    @field_validator("client_sampler")
    @classmethod
    def _known_sampler(cls, client_sampler: str) -> str:
        CLIENT_SAMPLERS.parse(client_sampler)
        return client_sampler

    @field_validator("clients", mode="before")
    @classmethod
    def _expand_counts(cls, clients: Any) -> Any:
        if not isinstance(clients, list | tuple):
            return clients
        expanded: list[Any] = []
        for position, entry in enumerate(clients):
            if not (isinstance(entry, Mapping) and "count" in entry):
                expanded.append(entry)
                continue
            rest = {name: value for name, value in entry.items() if name != "count"}
            count = entry["count"]
            if type(count) is not int or count < 1:
                raise ValueError(f"entry {position}: count must be an integer of at least 1, got {shown(count)}")
            CLIENTS.check(len(expanded) + count, f"entry {position}: ")
            expanded.extend(rest | {"key": f"{rest.get('key', 'client')}-{i}"} for i in range(count))
        return expanded

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        keys = [client.key for client in self.clients]
        if not keys:
            raise ValueError("field clients: lists no client; add at least one")
        CLIENTS.check(len(keys), "field clients: ")
        key, uses = Counter(keys).most_common(1)[0]
        if uses > 1:
            raise ValueError(f"field clients: the key {key} is used {uses} times; give each client its own")
        for client in self.clients:
            if isinstance(client.epochs, tuple) and len(client.epochs) != self.rounds:
                raise ValueError(
                    f"client {client.key}: epochs has {len(client.epochs)} entries for {self.rounds} rounds; "
                    "give one a round, or one number"
                )
        if self.clients_per_round is not None and self.clients_per_round > len(keys):
            raise ValueError(
                f"field clients_per_round: must be at most {len(keys)}, the clients, got {self.clients_per_round}"
            )
        check_division(self.data, self.partition, tuple(keys))
        if isinstance(self.data, MemorySource) and len(self.class_names or ()) not in (0, self.data.data.classes):
            raise ValueError(f"field class_names: name the data's {self.data.data.classes} classes, or none")
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read and check a file; relative paths in it count from its folder."""
        path = Path(path)
        try:
            text = read_text(path, ENVIRONMENT_BYTES)
        except FileNotFoundError as error:
            raise InputError(f"environment file {path}: does not exist; check the path") from error
        except OSError as error:
            raise InputError(f"environment file {path}: cannot be read ({error.strerror})") from error
        except InputError as error:
            raise InputError(f"environment file {error}") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Self:
        """The environment in a TOML text that is, or will be, the file `path`."""
        try:
            result = cls(**parse_toml(text))
        except InputError as error:
            reason = str(error).removeprefix(f"{cls.__name__}: ")
            raise InputError(f"environment file {path}: {reason}") from error
        result._folder = path.parent
        return result

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, tuple[ArrayLike, ArrayLike]],
        test: tuple[ArrayLike, ArrayLike],
        *,
        rounds: int,
        batch_size: int,
        lr: float,
        epochs: Epochs | Mapping[str, Epochs] = 1,
        participation_probability: float | Mapping[str, float] = 1.0,
        model: ModelSpec | tuple[int, ...] = (),
        classes: int | None = None,
        clients_per_round: int | None = None,
        seed: int = 0,
        name: str = "in-memory",
        description: str = "",
    ) -> Self:
        """An environment over arrays at hand: (x, y) by client key, and a test pair.

        `epochs` and `participation_probability` are one value for all or a mapping by key; `model` may be just the
        widths of the hidden layers. Without `classes`, they are counted up to the highest label met.

        >>> x, y = [[0.0, 1.0], [1.0, 0.0]], [0, 1]
        >>> env = Environment.from_arrays({"a": (x, y), "b": (x, y)}, (x, y), rounds=3, batch_size=2, lr=0.1)
        >>> env.load()
        FederatedData(clients=2, samples=4, classes=2)
        """
        keys = tuple(clients)
        epochs_of: Mapping[str, int | tuple[int, ...]] = _by_key("epochs", epochs, keys)
        reliability_of = _by_key("participation_probability", participation_probability, keys)
        return cls(
            name=name,
            description=description,
            rounds=rounds,
            batch_size=batch_size,
            lr=lr,
            seed=seed,
            clients_per_round=clients_per_round,
            model=model if isinstance(model, ModelSpec) else ModelSpec(hidden=model),
            data=MemorySource(data=FederatedData.from_clients(clients, test, classes)),
            partition=GivenPartition(),
            clients=tuple(
                Client(key=k, epochs=epochs_of[k], participation_probability=reliability_of[k]) for k in keys
            ),
        )

    def replace(self, **changes: Any) -> Self:
        """A checked copy with other fields; the data are loaded again only where they may differ."""
        result = type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)
        result._folder = self._folder
        if "_loaded" in vars(self) and not changes.keys() & {"data", "partition", "clients", "class_names"}:
            vars(result)["_loaded"] = self._loaded
        return result

    def to_toml(self, folder: Path | None = None) -> str:
        """The same environment as a TOML file in `folder`, or beside the one it was read from."""
        if isinstance(self.data, MemorySource):
            raise InputError("Data in memory cannot go into a TOML file; save them as .npz and use source 'npz'.")
        content = self.model_dump(mode="json", exclude_none=True)
        if folder is not None and isinstance(self.data, NpzSource | FeaturesSource):
            given = located(self.data.path, self._folder)
            if is_plain_file(given):
                content["data"]["path"] = os.path.relpath(given, folder)
        return tomli_w.dumps(content)

    def epochs(self, k: int, round: int) -> int:
        """E_k^(t); the evaluation layer t = T repeats the last round's."""
        return epochs_at(self.clients[k].epochs, round)

    def class_name(self, c: int) -> str:
        """What class c is called: its name, or else its number."""
        return str(c) if self.class_names is None else self.class_names[c]

    def load(self) -> FederatedData:
        """The clients' data and the test set, read once and kept."""
        return self._loaded

    @cached_property  # not a private field: two environments are equal whether or not they were loaded
    def _loaded(self) -> FederatedData:
        keys = tuple(client.key for client in self.clients)
        classes = None if self.class_names is None else len(self.class_names)
        return divide(self.data, self.partition, keys, self._folder, classes)

    def digest(self, data: FederatedData) -> str:
        """SHA-256 of what makes the federation, so that weights can tell whether they were learned for it.

        Seed, rounds, name and description do not count.
        """
        content = {
            "clients": [
                {
                    "key": client.key,
                    "epochs": client.epochs,
                    "participation_probability": client.participation_probability,
                    "size": size,
                }
                for client, size in zip(self.clients, data.sizes, strict=True)
            ],
            "label_counts": data.label_counts.tolist(),
            "clients_per_round": self.clients_per_round,
            "client_sampler": self.client_sampler,
            "model": self.model.model_dump(mode="json"),
            "batch_size": self.batch_size,
            "lr": self.lr,
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _by_key(field: str, value: Value | Mapping[str, Value], keys: tuple[str, ...]) -> Mapping[str, Value]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(keys, value)
    if odd := sorted(value.keys() ^ set(keys)):
        state = "names no client" if odd[0] in value else "is missing"
        raise InputError(f"field {field}: {odd[0]} {state}; give one entry for each client")
    return value

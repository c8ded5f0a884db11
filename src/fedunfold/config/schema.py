"""What is heterogeneous about a federation, in one validated description that fits in a TOML file."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack

import tomli_w
from numpy.typing import ArrayLike
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from fedunfold.config.clock import Clock
from fedunfold.config.fields import (
    BatchSize,
    Client,
    Name,
    OuterSchedule,
    Rounds,
    SamplerName,
    TaskField,
    expand_counts,
)
from fedunfold.config.model import Model, ModelSpec
from fedunfold.config.training import TrainingSettings, by_key
from fedunfold.core.errors import InputError
from fedunfold.core.participation import epochs_at
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.core.task import Task
from fedunfold.data.arrays import Arrays
from fedunfold.data.config import DataSource, FeaturesSource, MemorySource, NpzSource, check_division, divide, resolve
from fedunfold.data.datasets import Collate, DatasetRows
from fedunfold.data.federated import FederatedData
from fedunfold.data.partitions import GivenPartition, Partition
from fedunfold.io.atomic import is_plain_file, parse_toml, read_text
from fedunfold.io.limits import CLIENTS, ENVIRONMENT_BYTES

if TYPE_CHECKING:
    from torch.utils.data import Dataset

DECIDE_DATA = {"data", "partition", "clients", "class_names", "task", "server_rows"}
IN_DIGEST = {"clients", "clients_per_round", "client_sampler", "task", "model", "batch_size", "lr"}


class Environment(Settings):
    """Clients, their data, the model and the schedule of local training.

    Attributes:
        name: What the environment is called.
        description: What it is, for people.
        rounds: Rounds T.
        batch_size: Samples in a local step; a client with fewer takes what it has.
        lr: The clients' local learning rate η.
        seed: Randomness of training; who holds which data does not depend on it.
        clients_per_round: How many clients are drawn each round; all of them when None.
        client_sampler: How they are drawn: uniform, by-size, importance, power-of-choice or round-robin, or another by
            its name and settings (`selection`).
        holdout: The part of its rows that every client keeps from training and is tested on by itself.
        server_rows: How many rows the server gets of the clients', drawn among all of them; no client trains on them.
        clock: How long clients take in simulated time, and how an asynchronous server waits for them.
        class_names: The classes in the order of their numbers; they fix how many classes there are.
        paper_schedule: The slow outer schedule of a publication.
        task: What a model is trained for; without it, classification of as many classes as there are labels.
        model: The model.
        data: Where the data come from.
        partition: Who holds which of them.
        clients: The participants. An entry given as a table may have ``count = n`` and stands for n clients key-0 …
            key-(n−1).

    >>> import fedunfold as fu
    >>> env = fu.environment("digits-label-skew").replace(rounds=5)
    >>> env.rounds, env.load().keys
    (5, ('site-a', 'site-b', 'site-c', 'site-d', 'site-e'))
    """

    name: Name
    description: str = ""
    rounds: Rounds
    batch_size: BatchSize
    lr: float = Field(gt=0)
    seed: Natural = 0
    clients_per_round: Count | None = None
    client_sampler: SamplerName = "uniform"
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = None
    server_rows: Count | None = None
    clock: Clock | None = None
    class_names: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    paper_schedule: OuterSchedule = OuterSchedule(iterations=400, lr=0.001)
    task: TaskField | None = None
    model: Model = ModelSpec()
    data: DataSource
    partition: Partition
    clients: Annotated[tuple[Client, ...], BeforeValidator(expand_counts)]

    _folder: Path = PrivateAttr(default=Path())

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
        if self.task is not None and len(self.class_names or ()) not in (0, self.task.num_groups):
            raise ValueError(f"field class_names: the task {self.task.name} has {self.task.num_groups} classes")
        if isinstance(self.data, MemorySource) and len(self.class_names or ()) not in (0, self.data.data.classes):
            raise ValueError(f"field class_names: name the data's {self.data.data.classes} classes, or none")
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read and check a file.

        Args:
            path: The file; relative paths in it count from its folder.

        Raises:
            InputError: The file cannot be read, or a field is wrong; the message names it.
        """
        path = Path(path)
        try:
            text = read_text(path, ENVIRONMENT_BYTES)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            reason = "does not exist; check the path" if absent else f"cannot be read ({error.strerror})"
            raise InputError(f"environment file {path}: {reason}") from error
        except InputError as error:
            raise InputError(f"environment file {error}") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Self:
        """Check the text of a file.

        Args:
            text: TOML.
            path: The file that it is, or will be.
        """
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
        clients: Mapping[str, tuple[Arrays, ArrayLike]],
        test: tuple[Arrays, ArrayLike],
        *,
        classes: int | None = None,
        task: Task | None = None,
        server_data: tuple[Arrays, ArrayLike] | None = None,
        **settings: Unpack[TrainingSettings],
    ) -> Self:
        """Make an environment over arrays.

        Args:
            clients: (x, y) by client key; x may be several arrays by name, which a model gets by name.
            test: (x, y) of the test set.
            classes: The number of classes; without it, the highest label plus one.
            task: What a model is trained for; without it, classification.
            server_data: (x, y) that the server holds itself, for rules that need such data.
            **settings: rounds, batch_size, lr, and more (`TrainingSettings`).

        Returns:
            The environment, its data loaded.

        >>> x, y = [[0.0, 1.0], [1.0, 0.0]], [0, 1]
        >>> env = Environment.from_arrays({"a": (x, y), "b": (x, y)}, (x, y), rounds=3, batch_size=2, lr=0.1)
        >>> env.load()
        FederatedData(clients=2, samples=4, task=classification)
        """
        data = FederatedData.from_clients(clients, test, classes, task, server_data)
        return cls._over(data, task, {"name": "in-memory", **settings})

    @classmethod
    def from_datasets(
        cls,
        clients: "Mapping[str, Dataset[Any]]",
        test: "Dataset[Any]",
        *,
        task: Task,
        target: str | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        server_data: "Dataset[Any] | None" = None,
        **settings: Unpack[TrainingSettings],
    ) -> Self:
        """Make an environment over data sets that may be larger than memory: only minibatches are read.

        Args:
            clients: A `torch.utils.data.Dataset` by client key, or anything with a length and samples by index, such as
                a Hugging Face data set. Samples are (x, y), or dicts.
            test: That of the test set.
            task: What a model is trained for.
            target: The name of y where samples are dicts; the rest are the inputs.
            collate: Makes a minibatch of a list of samples; torch's `default_collate` without it.
            workers: Processes that read ahead.
            server_data: What the server holds itself, for rules that need such data.
            **settings: rounds, batch_size, lr, and more (`TrainingSettings`).

        Returns:
            The environment. An IterableDataset, which must have a length, is read in its own order and goes with the
            first-order adjoint only.

        >>> import torch
        >>> import fedunfold as fu
        >>> from torch.utils.data import TensorDataset
        >>> rows = TensorDataset(torch.eye(4), torch.tensor([0, 1, 0, 1]))
        >>> env = Environment.from_datasets(
        ...     {"a": rows, "b": rows}, rows, task=fu.classification(2), rounds=2, batch_size=2, lr=0.1)
        >>> env.load()
        FederatedData(clients=2, samples=8, task=classification)
        """
        reading: dict[str, Any] = {"target": target, "collate": collate, "workers": workers}
        named = {f"client {key}": found for key, found in clients.items()}
        rows, held = DatasetRows(named, task, **reading), DatasetRows({"the test set": test}, task, **reading)
        own = None if server_data is None else DatasetRows({"the server": server_data}, task, **reading)
        data = FederatedData.from_datasets(tuple(clients), rows, held, task, own)
        return cls._over(data, task, {"name": "datasets", **settings})

    @classmethod
    def _over(cls, data: FederatedData, task: Task | None, settings: Mapping[str, Any]) -> Self:
        """An environment over data of the program."""
        values = dict(settings)
        epochs: Mapping[str, Any] = by_key("epochs", values.pop("epochs", 1), data.keys)
        probability = values.pop("participation_probability", 1.0)
        probabilities: Mapping[str, float] = by_key("participation_probability", probability, data.keys)
        model = values.pop("model", ())
        return cls(
            task=task,
            model=ModelSpec(hidden=model) if isinstance(model, tuple) else model,
            data=MemorySource(data=data),
            partition=GivenPartition(),
            clients=tuple(
                Client(key=key, epochs=epochs[key], participation_probability=probabilities[key]) for key in data.keys
            ),
            **values,
        )

    def replace(self, **changes: Any) -> Self:
        """A checked copy with other fields.

        Args:
            **changes: The fields and their values.

        Returns:
            The copy; its data are loaded again only where they may differ.
        """
        result = type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)
        result._folder = self._folder
        if "_loaded" in vars(self) and not changes.keys() & DECIDE_DATA:
            vars(result)["_loaded"] = self._loaded
        return result

    def to_toml(self, folder: Path | None = None) -> str:
        """Write the environment as TOML.

        Args:
            folder: Where the file will be; without it, beside the one it was read from.

        Returns:
            The file's text.
        """
        if isinstance(self.data, MemorySource):
            raise InputError("Data in memory cannot go into a TOML file; save them as .npz and use source 'npz'.")
        content = self.model_dump(mode="json", exclude_none=True)
        for part, field, given in (("data", "path", self.data_file), ("clock", "trace", self.trace_file)):
            if folder is not None and given is not None and is_plain_file(given):
                content[part][field] = os.path.relpath(given, folder)
        return tomli_w.dumps(content)

    @property
    def data_file(self) -> Path | None:
        """The file that its data come from, where they come from one."""
        if isinstance(self.data, NpzSource | FeaturesSource):
            return resolve(self.data.path, self._folder)
        return None

    @property
    def trace_file(self) -> Path | None:
        """The file of its clock's trace, where that is in one."""
        trace = None if self.clock is None else self.clock.trace
        return resolve(trace, self._folder) if isinstance(trace, str) else None

    def epochs(self, k: int, t: int) -> int:
        """E_k^(t) of client k in round t; the final evaluation, t = T, repeats the last round's."""
        return epochs_at(self.clients[k].epochs, t)

    def class_name(self, c: int) -> str:
        """What class c is called: its name, or else its number."""
        return str(c) if self.class_names is None else self.class_names[c]

    def load(self) -> FederatedData:
        """The clients' data and the test set, read once; without what clients hold out."""
        return self._loaded if self.holdout is None else self._parts[0]

    def load_held_out(self) -> FederatedData | None:
        """What the clients hold out; None where they hold out nothing."""
        return None if self.holdout is None else self._parts[1]

    @cached_property
    def _parts(self) -> tuple[FederatedData, FederatedData]:
        return self._loaded.split(self.holdout or 0.0)

    @cached_property  # not a private field: two environments are equal whether or not they were loaded
    def _loaded(self) -> FederatedData:
        keys = tuple(client.key for client in self.clients)
        classes = None if self.class_names is None else len(self.class_names)
        data = divide(self.data, self.partition, keys, self._folder, classes, self.task)
        return data if self.server_rows is None else data.with_server_rows(self.server_rows)

    def digest(self, data: FederatedData) -> str:
        """A hash of what makes the federation, so that weights can tell whether they were learned for it.

        Clients with their label counts, the server's own targets (data sets by some of their samples), how and how many
        clients are drawn in a round, model, batch size and learning rate count; seed, rounds, name and description do
        not. Nothing is built or loaded for it.

        Args:
            data: The environment's data, or a part of them.

        Returns:
            SHA-256 in hexadecimal.
        """
        settings = json.dumps(self.model_dump(mode="json", include=IN_DIGEST), sort_keys=True, separators=(",", ":"))
        if isinstance(data.inputs, DatasetRows):
            return hashlib.sha256((settings + data.checksum).encode()).hexdigest()
        counts = data.label_counts.numpy().astype("<i8")
        held = b"" if data.server is None else data.server[1].numpy().tobytes()
        return hashlib.sha256(settings.encode() + counts.tobytes() + held).hexdigest()

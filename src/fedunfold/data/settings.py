"""The settings that say where data come from and how they are divided, and how wrong ones are reported."""

import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from fedunfold.data import partition as dealing
from fedunfold.data import sources
from fedunfold.data.federated import FederatedData
from fedunfold.data.partition import Indices
from fedunfold.errors import InputError
from fedunfold.randomness import generator

Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]


def explain(error: ValidationError, prefix: str = "") -> InputError:
    """pydantic's report as one line: the first field that is wrong, how, and how many more are."""
    errors = error.errors()
    path, message = _locate(errors[0])
    field = f"field {'.'.join(path)}: " if path else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    result = InputError(f"{prefix}{field}{message}{more}")
    result.__cause__ = error
    return result


def _locate(details: Any) -> tuple[list[str], str]:
    """(path of the field, what is wrong with it) for one pydantic error."""
    path = [str(part) for part in details["loc"]]
    if path[:1] in (["data"], ["partition"]):
        del path[1:2]  # pydantic adds the chosen variant's tag, which is no field of the file
    context = details.get("ctx", {})
    inner = context.get("error")
    if isinstance(inner, InputError) and isinstance(inner.__cause__, ValidationError):
        inner_path, message = _locate(inner.__cause__.errors()[0])
        return path + inner_path, message
    got = f", got {reprlib.repr(details['input'])}"
    match details["type"]:
        case "missing":
            return path, "is missing"
        case "extra_forbidden":
            return path, "is not a known field; remove it or correct its name"
        case "union_tag_invalid":
            choices = context["expected_tags"]
            return path, f"{context['discriminator']} must be one of {choices}, not {context['tag']!r}"
        case "union_tag_not_found":
            return path, f"needs {context['discriminator']}"
        case "greater_than_equal":
            return path, f"must be at least {context['ge']:g}{got}"
        case "less_than_equal":
            return path, f"must be at most {context['le']:g}{got}"
        case "greater_than":
            return path, f"must be more than {context['gt']:g}{got}"
        case "value_error":
            return path, str(inner)
        case _:
            return path, details["msg"].replace("Input should be", "must be") + got


class Settings(BaseModel):
    """Frozen, without unknown fields; a wrong value is an InputError of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, f"{type(self).__name__}: ") from error


class DigitsSource(Settings):
    """scikit-learn's digits."""

    source: Literal["digits"] = "digits"

    def load(self, folder: Path) -> sources.Dataset:
        return sources.load_digits()


class MnistSource(Settings):
    """MNIST, read or downloaded."""

    source: Literal["mnist"] = "mnist"

    def load(self, folder: Path) -> sources.Dataset:
        return sources.load_mnist()


class NpzSource(Settings):
    """A user's own .npz file; a relative path counts from the environment file's folder."""

    source: Literal["npz"] = "npz"
    path: str = Field(min_length=1)

    def load(self, folder: Path) -> sources.Dataset:
        return sources.load_npz(folder / Path(self.path).expanduser())

    def load_clients(self, folder: Path) -> tuple[dict[str, sources.Pair], sources.Pair]:
        return sources.load_npz_clients(folder / Path(self.path).expanduser())


class MemorySource(Settings):
    """Data that were handed over in the program; they cannot be written to a file."""

    source: Literal["memory"] = "memory"
    data: InstanceOf[FederatedData]


DataSource = Annotated[DigitsSource | MnistSource | NpzSource | MemorySource, Field(discriminator="source")]


class Seeded(Settings):
    """A division that draws. Its seed is its own: another seed of the environment moves no data."""

    seed: Natural = 0

    @property
    def rng(self) -> np.random.Generator:
        return generator(self.seed, "partition")


class IidPartition(Seeded):
    """Equal shares of the shuffled rows."""

    kind: Literal["iid"] = "iid"

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.iid(y, clients, self.rng)


class SizesPartition(Seeded):
    """N_k random rows for client k."""

    kind: Literal["sizes"] = "sizes"
    sizes: tuple[Count, ...]

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.by_sizes(y, self.sizes, self.rng)


class LabelsPartition(Seeded):
    """Rows of the listed labels only, N_k of them where sizes are given."""

    kind: Literal["labels"] = "labels"
    labels: tuple[tuple[Natural, ...], ...]
    sizes: tuple[Count, ...] | None = None

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.by_labels(y, self.labels, self.sizes, self.rng)


class DirichletPartition(Seeded):
    """Each class spread by Dirichlet(alpha): the smaller alpha, the fewer classes a client has."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(ge=dealing.ALPHA_RANGE[0], le=dealing.ALPHA_RANGE[1])

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.dirichlet(y, clients, self.alpha, self.rng)


class IndicesPartition(Settings):
    """The training rows of every client, listed."""

    kind: Literal["indices"] = "indices"
    indices: tuple[tuple[Natural, ...], ...]

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.by_indices(y, self.indices)


class GivenPartition(Settings):
    """The source already holds every client's own arrays."""

    kind: Literal["given"] = "given"


Partition = Annotated[
    IidPartition | SizesPartition | LabelsPartition | DirichletPartition | IndicesPartition | GivenPartition,
    Field(discriminator="kind"),
]


def check_division(source: DataSource, partition: Partition, keys: tuple[str, ...]) -> None:
    """Refuse a partition that does not fit the source or the number of clients."""
    given = isinstance(partition, GivenPartition)
    if given and not isinstance(source, NpzSource | MemorySource):
        raise InputError(f"field partition: 'given' needs arrays per client, which {source.source} lacks")
    if isinstance(source, MemorySource):
        if not given:
            raise InputError("field partition: data in memory are divided already; use 'given'")
        if source.data.keys != keys:
            raise InputError("field clients: the keys differ from those of the data in memory")
    for name in ("sizes", "labels", "indices"):
        entries = getattr(partition, name, None)
        if entries is not None and len(entries) != len(keys):
            raise InputError(
                f"field partition.{name}: has {len(entries)} entries for {len(keys)} clients; give one each"
            )


def divide(source: DataSource, partition: Partition, keys: tuple[str, ...], folder: Path) -> FederatedData:
    """Load the source and give every client its rows; relative paths count from `folder`."""
    if isinstance(source, MemorySource):
        return source.data
    if isinstance(partition, GivenPartition):
        if not isinstance(source, NpzSource):
            raise InputError(f"The partition 'given' needs arrays per client, which {source.source} lacks.")
        pairs, test = source.load_clients(folder)
        for key in sorted(pairs.keys() ^ set(keys)):
            where = "the file" if key in pairs else "the environment"
            raise InputError(
                f"{source.path}: client {key} is only in {where}; list the same clients in both."
            )
        return FederatedData.from_clients({key: pairs[key] for key in keys}, test)
    rows = source.load(folder)
    parts = partition.split(rows.y_train, len(keys))
    clients = {key: (rows.x_train[part], rows.y_train[part]) for key, part in zip(keys, parts, strict=True)}
    classes = 1 + int(max(rows.y_train.max(), rows.y_test.max()))
    return FederatedData.from_clients(clients, (rows.x_test, rows.y_test), classes)

"""The settings that say where data come from and how they are divided."""

import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf

from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.data import partitions as dealing
from fedunfold.data import sources
from fedunfold.data.federated import FederatedData
from fedunfold.data.partitions import Indices
from fedunfold.data.vision.files import load_features
from fedunfold.data.vision.splitting import split, unit_rows
from fedunfold.io.atomic import is_plain_file


def located(path: str, folder: Path) -> Path:
    """A path in an environment file; a relative one counts from the file's folder, ~ is the user's own."""
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"field data.path: {path} starts in the folder of a user who is not there.") from error


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
        return sources.load_npz(located(self.path, folder))

    def load_clients(self, folder: Path) -> tuple[dict[str, sources.Pair], sources.Pair]:
        return sources.load_npz_clients(located(self.path, folder))


class FeaturesSource(Settings):
    """Frozen-backbone features of images, split by class into training and test rows.

    A relative path counts from the environment file's folder, then from the folder in FEDUNFOLD_DATA. With
    `scaling` "unit", every row is divided by its root mean square, which a client can do without the others.
    """

    source: Literal["features"] = "features"
    path: str = Field(min_length=1)
    test_fraction: float = Field(0.2, gt=0, lt=1)
    seed: Natural = 0
    scaling: Literal["none", "unit"] = "none"

    def load(self, folder: Path) -> sources.Dataset:
        found = located(self.path, folder)
        shared = os.environ.get("FEDUNFOLD_DATA")
        if not is_plain_file(found) and shared:
            found = Path(shared) / self.path
        if not is_plain_file(found):
            raise InputError(
                f"There is no features file {self.path} beside the environment or in the folder FEDUNFOLD_DATA; "
                "extract the features of the images into one."
            )
        features = load_features(found)
        if self.scaling == "unit":
            features = unit_rows(features)
        return split(features, self.test_fraction, self.seed)


class MemorySource(Settings):
    """Data that were handed over in the program; they cannot be written to a file."""

    source: Literal["memory"] = "memory"
    data: InstanceOf[FederatedData]


DataSource = Annotated[
    DigitsSource | MnistSource | NpzSource | FeaturesSource | MemorySource, Field(discriminator="source")
]


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


class SharesPartition(Seeded):
    """Which classes a client holds and in what proportion: [class, share] pairs for every client."""

    kind: Literal["shares"] = "shares"
    shares: tuple[tuple[tuple[Natural, Annotated[float, Field(gt=0)]], ...], ...]

    def split(self, y: NDArray[np.int64], clients: int) -> list[Indices]:
        return dealing.by_shares(y, self.shares, self.rng)


class GivenPartition(Settings):
    """The source already holds every client's own arrays."""

    kind: Literal["given"] = "given"


Partition = Annotated[
    IidPartition
    | SizesPartition
    | LabelsPartition
    | SharesPartition
    | DirichletPartition
    | IndicesPartition
    | GivenPartition,
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
    for name in ("sizes", "labels", "shares", "indices"):
        entries = getattr(partition, name, None)
        if entries is not None and len(entries) != len(keys):
            raise InputError(
                f"field partition.{name}: has {len(entries)} entries for {len(keys)} clients; give one each"
            )


def divide(
    source: DataSource, partition: Partition, keys: tuple[str, ...], folder: Path, classes: int | None = None
) -> FederatedData:
    """Load the source and give every client its rows; relative paths count from `folder`.

    Without `classes`, they are counted up to the highest label met.
    """
    if isinstance(source, MemorySource):
        return source.data
    if isinstance(partition, GivenPartition):
        if not isinstance(source, NpzSource):
            raise InputError(f"The partition 'given' needs arrays per client, which {source.source} lacks.")
        pairs, test = source.load_clients(folder)
        for key in sorted(pairs.keys() ^ set(keys)):
            where = "the file" if key in pairs else "the environment"
            raise InputError(f"{source.path}: client {key} is only in {where}; list the same clients in both.")
        return FederatedData.from_clients({key: pairs[key] for key in keys}, test, classes)
    rows = source.load(folder)
    parts = partition.split(rows.y_train, len(keys))
    clients = {key: (rows.x_train[part], rows.y_train[part]) for key, part in zip(keys, parts, strict=True)}
    highest = int(max(rows.y_train.max(), rows.y_test.max()))
    return FederatedData.from_clients(clients, (rows.x_test, rows.y_test), classes or 1 + highest)

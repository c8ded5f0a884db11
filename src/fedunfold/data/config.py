"""The settings that say where data come from, and how a source is partitioned over clients."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, InstanceOf

from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.core.settings import Natural, Settings
from fedunfold.core.task import Task
from fedunfold.data import sources
from fedunfold.data.fashion_mnist import load_fashion_mnist
from fedunfold.data.federated import FederatedData
from fedunfold.data.natural.base import NaturalSource
from fedunfold.data.natural.heart_disease import HeartDiseaseSource
from fedunfold.data.natural.shakespeare import ShakespeareSource
from fedunfold.data.natural.sites import BreastCancerSitesSource, DiabetesSitesSource
from fedunfold.data.natural.tcga_brca import TcgaBrcaSource
from fedunfold.data.natural.vowel import VowelSource
from fedunfold.data.natural.wisdm import WisdmSource
from fedunfold.data.partitions import GivenPartition, IidPartition, IndicesPartition, Partition, SizesPartition
from fedunfold.data.vision.files import load_features
from fedunfold.data.vision.splitting import split, unit_rows
from fedunfold.io.atomic import is_plain_file

BY_ROW = (IidPartition, SizesPartition, IndicesPartition)
"""Partitions for which it does not matter what the targets are."""


def resolve(path: str, folder: Path) -> Path:
    """A path in an environment file; a relative one counts from the file's folder, ~ is the user's own."""
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"field data.path: {path} starts in the folder of an unknown user.") from error


class DigitsSource(Settings):
    """scikit-learn's digits."""

    source: Literal["digits"] = "digits"

    def load(self, folder: Path, task: Task | None = None) -> sources.Dataset:
        return sources.load_digits()


class MnistSource(Settings):
    """MNIST, read or downloaded."""

    source: Literal["mnist"] = "mnist"

    def load(self, folder: Path, task: Task | None = None) -> sources.Dataset:
        return sources.load_mnist()


class FashionMnistSource(Settings):
    """Fashion-MNIST, read or downloaded."""

    source: Literal["fashion-mnist"] = "fashion-mnist"

    def load(self, folder: Path, task: Task | None = None) -> sources.Dataset:
        return load_fashion_mnist()


class NpzSource(Settings):
    """An .npz file with custom data.

    Attributes:
        path: The file; a relative path counts from the environment file's folder.
    """

    source: Literal["npz"] = "npz"
    path: str = Field(min_length=1)

    def load(self, folder: Path, task: Task | None = None) -> sources.Dataset:
        return sources.load_npz(resolve(self.path, folder), task)

    def load_clients(self, folder: Path, task: Task | None = None) -> tuple[dict[str, sources.Pair], sources.Pair]:
        return sources.load_npz_clients(resolve(self.path, folder), task)


class FeaturesSource(Settings):
    """Frozen-backbone features of images, split by class into training and test rows.

    Attributes:
        path: The file; a relative path counts from the environment file's folder, then from the folder FEDUNFOLD_DATA.
        test_fraction: The part of each class's rows to test on.
        seed: Draws them.
        scaling: With "unit", every row is divided by its root mean square, which a client can do without the others.
    """

    source: Literal["features"] = "features"
    path: str = Field(min_length=1)
    test_fraction: float = Field(0.2, gt=0, lt=1)
    seed: Natural = 0
    scaling: Literal["none", "unit"] = "none"

    def load(self, folder: Path, task: Task | None = None) -> sources.Dataset:
        found = resolve(self.path, folder)
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
    """Data of the program, which cannot be written to a file.

    Attributes:
        data: The data.
    """

    source: Literal["memory"] = "memory"
    data: InstanceOf[FederatedData]


DataSource = Annotated[
    DigitsSource
    | MnistSource
    | FashionMnistSource
    | NpzSource
    | FeaturesSource
    | MemorySource
    | TcgaBrcaSource
    | WisdmSource
    | ShakespeareSource
    | HeartDiseaseSource
    | VowelSource
    | DiabetesSitesSource
    | BreastCancerSitesSource,
    Field(discriminator="source"),
]


def check_division(source: DataSource, partition: Partition, keys: tuple[str, ...]) -> None:
    """Refuse a partition that does not fit.

    Args:
        source: Where the data come from.
        partition: How they are divided.
        keys: The clients.

    Raises:
        InputError: The partition does not fit the source or the number of clients.
    """
    given = isinstance(partition, GivenPartition)
    if given and not isinstance(source, NpzSource | MemorySource | NaturalSource):
        raise InputError(f"field partition: 'given' needs arrays per client, which {source.source} lacks")
    if isinstance(source, MemorySource | NaturalSource) and not given:
        where = "in memory" if isinstance(source, MemorySource) else f"of {source.source}"
        raise InputError(f"field partition: data {where} are divided already; use 'given'")
    if isinstance(source, MemorySource) and source.data.keys != keys:
        raise InputError("field clients: the keys differ from those of the data in memory")
    for name in ("sizes", "labels", "shares", "indices"):
        entries = getattr(partition, name, None)
        if entries is not None and len(entries) != len(keys):
            raise InputError(
                f"field partition.{name}: has {len(entries)} entries for {len(keys)} clients; give one each"
            )


def divide(
    source: DataSource,
    partition: Partition,
    keys: tuple[str, ...],
    folder: Path,
    classes: int | None = None,
    task: Task | None = None,
) -> FederatedData:
    """Load a source and give every client its rows.

    Args:
        source: Where the data come from.
        partition: Who gets which rows.
        keys: The clients.
        folder: Where relative paths count from.
        classes: The number of classes; without it, the highest label plus one.
        task: What a model is trained for; without it, classification.

    Returns:
        The checked data of all clients.
    """
    check_division(source, partition, keys)
    if isinstance(source, MemorySource):
        return source.data
    if isinstance(source, NaturalSource) or isinstance(partition, GivenPartition):
        assert isinstance(source, NaturalSource | NpzSource)
        pairs, test = source.load_clients() if isinstance(source, NaturalSource) else source.load_clients(folder, task)
        for key in sorted(pairs.keys() ^ set(keys)):
            where = "the data" if key in pairs else "the environment"
            name = source.path if isinstance(source, NpzSource) else source.source
            raise InputError(f"{name}: client {key} is only in {where}; list the same clients in both.")
        return FederatedData.from_clients({key: pairs[key] for key in keys}, test, classes, task)
    rows = source.load(folder, task)
    if not isinstance(partition, BY_ROW) and (rows.y_train.ndim != 1 or rows.y_train.dtype.kind not in "ui"):
        raise InputError(f"field partition: '{partition.kind}' divides by class; use iid, sizes or indices here")
    rng = generator(getattr(partition, "seed", 0), "partition")
    parts = partition.split(rows.y_train, len(keys), rng)
    clients = {key: (rows.x_train[part], rows.y_train[part]) for key, part in zip(keys, parts, strict=True)}
    if task is None and classes is None:  # also those that no client holds
        classes = 1 + int(max(rows.y_train.max(), rows.y_test.max()))
    return FederatedData.from_clients(clients, (rows.x_test, rows.y_test), classes, task)

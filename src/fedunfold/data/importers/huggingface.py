"""A Hugging Face data set, from the hub or local files, dealt to clients by a partitioner of flwr-datasets.

Needs the extra `datasets`. Nothing that a data set brings is executed: scripts are not supported by the library any
more, and its one builder that unpickles is refused here.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.importers import tabular
from fedunfold.data.importers.csv import guessed_label
from fedunfold.data.importers.image_transform import ImageTransform
from fedunfold.data.importers.imported import ImportedData, Rows, client_keys, notes_on_rows, split_off_test
from fedunfold.data.importers.partition_spec import PartitionSpec
from fedunfold.data.npz import first_line

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
SMALLEST = 2  # rows of a client; Dirichlet draws again until every one has them
# What the library raises for a wrong name, no network or a broken file.
NOT_LOADED = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError)


def _library(name: str) -> Any:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr-datasets is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError("Hugging Face data sets need flwr-datasets; run: pip install 'fedunfold[datasets]'") from error


@dataclass(frozen=True)
class Split:
    """Rows of a data set under a name for messages; a sheet of text cells, unless there are images in it."""

    name: str
    rows_: Any

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.rows_.column_names)

    @property
    def image(self) -> str | None:
        """The first column of images."""
        kind = _library("datasets").Image
        return next((name for name in self.columns if isinstance(self.rows_.features[name], kind)), None)

    def class_names(self, column: str) -> list[str] | None:
        """Of a column that holds class numbers and knows their names."""
        feature = self.rows_.features[column]
        return list(feature.names) if isinstance(feature, _library("datasets").ClassLabel) else None

    def rows(self) -> Iterator[tuple[int, Sequence[str]]]:
        plain = _library("datasets").Value
        names = {column: self.class_names(column) for column in self.columns}
        for column, known in names.items():
            if known is None and not isinstance(self.rows_.features[column], plain):
                raise InputError(f"{self.name}: column {column} holds no numbers or texts; use --drop {column}.")
        for position, row in enumerate(self.rows_):
            yield position + 1, [_text(row[column], names[column]) for column in self.columns]

    def without(self, columns: Sequence[str]) -> "Split":
        return Split(self.name, self.rows_.remove_columns([name for name in columns if name in self.columns]))


def _text(value: Any, names: Sequence[str] | None) -> str:
    if value is None:
        return ""
    if names is not None:
        return names[value] if 0 <= value < len(names) else ""
    return str(value)


@dataclass(frozen=True)
class HubData:
    """The split that clients share, and the test's where there is one."""

    train: Split
    test: Split | None

    @classmethod
    def loaded(cls, name: str, test: str | None = None) -> "HubData":
        """By name on the hub, or a local file or folder; `test` names another split than ``test``."""
        datasets = _library("datasets")
        found = _load(datasets, name)
        train = "train" if "train" in found else next(iter(found))
        if test is not None and test not in found:
            raise InputError(f"--test: {name} has no split {test}, only {', '.join(found)}; or give a fraction.")
        wanted = test or "test"
        held = Split(f"{name} ({wanted})", found[wanted]) if wanted in found and wanted != train else None
        return cls(Split(f"{name} ({train})", found[train]), held)

    def guessed_label(self) -> str:
        """The first column with named classes, or the one whose name says so."""
        named = [column for column in self.train.columns if self.train.class_names(column) is not None]
        return named[0] if named else guessed_label(self.train.columns)

    def gather(
        self,
        dealing: PartitionSpec,
        clients: int | None,
        label: str,
        test: float,
        look: ImageTransform | None,
        *,
        drop: Sequence[str] = (),
        scaling: tabular.Scaling = "standard",
        seed: int = 0,
    ) -> ImportedData:
        """The clients' rows: of the image column, with a `look` at it, else of all columns as in a table."""
        if label not in self.train.columns:
            raise InputError(f"--label: {self.train.name} has no column {label}, only {', '.join(self.train.columns)}.")
        parts = _dealt(self.train, dealing, clients, label, seed)
        image = self.train.image
        if image is not None and look is not None:
            return _gather_images(parts, self.test, image, label, test, look, seed)
        for name in drop:
            if name == label or name not in self.train.columns:
                raise InputError(f"--drop: {name} is the label or no column of {self.train.name}; leave it out.")
        # The column that named the clients would tell the model who they are.
        away = [*drop, *([dealing.value] if dealing.kind == "natural" else [])]
        sheets = {key: part.without(away) for key, part in parts.items()}
        held = test if self.test is None else self.test.without(away)
        return tabular.encode(sheets, held, label, scaling=scaling, seed=seed)


def _load(datasets: Any, name: str) -> Any:
    path = Path(name).expanduser()
    builder = BUILDERS.get(path.suffix.lower()) if path.is_file() else None
    if path.is_file() and builder is None:
        raise InputError(
            f"--dataset {name}: is no data file; give one that ends in {', '.join(BUILDERS)}, or a folder."
        )
    known = importlib.import_module("datasets.packaged_modules")._PACKAGED_DATASETS_MODULES
    if builder is None and not path.is_dir() and name in known:
        raise InputError(f"--dataset {name}: is a kind of file; give the path of the file or folder itself.")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for library in (datasets, importlib.import_module("huggingface_hub.utils")):
        library.logging.set_verbosity(50)  # what goes wrong is told by the error
    try:
        if builder is not None:
            return datasets.load_dataset(builder, data_files={"train": str(path)})
        return datasets.load_dataset(str(path) if path.is_dir() else name)
    except NOT_LOADED as error:
        raise InputError(
            f"--dataset {name}: cannot be loaded ({first_line(error)}); check the name and the network, "
            "or give a local file or folder."
        ) from error


def _dealt(train: Split, dealing: PartitionSpec, clients: int | None, label: str, seed: int) -> dict[str, Split]:
    """Each client's rows, by key: client-0, client-1, …, or what the natural column calls them."""
    made = _partitioner(dealing, clients, label, seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # among the libraries below, of no use to the user
            made.dataset = train.rows_.shuffle(seed=seed)
            parts = [made.load_partition(i) for i in range(made.num_partitions)]
    except NOT_LOADED as error:
        raise InputError(f"--partitioner {dealing.kind}: cannot divide {train.name} ({first_line(error)}).") from error
    names = [f"client-{i}" for i in range(len(parts))]
    if dealing.kind == "natural":
        names = [str(made.partition_id_to_natural_id[i]) for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        if not len(part):
            raise InputError(f"--partitioner {dealing.kind}: leaves {name} without a row; use fewer --clients.")
    by_name = dict(zip(names, parts, strict=True))
    keys = client_keys({name: name for name in names}, f"--partitioner natural:column={dealing.value}")
    return {key: Split(f"{train.name} at {key}", by_name[name]) for key, name in keys.items()}


def _partitioner(dealing: PartitionSpec, clients: int | None, label: str, seed: int) -> Any:
    library = _library("flwr_datasets.partitioner")
    value = dealing.value
    if dealing.kind == "natural":
        return library.NaturalIdPartitioner(partition_by=value)
    by_label = {"num_partitions": clients, "partition_by": label, "seed": seed}
    makers = {
        "iid": lambda: library.IidPartitioner(clients),
        "linear": lambda: library.LinearPartitioner(clients),
        "exponential": lambda: library.ExponentialPartitioner(clients),
        "dirichlet": lambda: library.DirichletPartitioner(alpha=value, min_partition_size=SMALLEST, **by_label),
        "shard": lambda: library.ShardPartitioner(num_shards_per_partition=value, **by_label),
        "pathological": lambda: library.PathologicalPartitioner(
            num_classes_per_partition=value,
            class_assignment_mode="first-deterministic",  # so that no class is left out where there is room for all
            **by_label,
        ),
    }
    try:
        return makers[dealing.kind]()
    except NOT_LOADED as error:
        raise InputError(f"--partitioner {dealing.kind}: {first_line(error)}.") from error


def _gather_images(
    parts: dict[str, Split], held: Split | None, image: str, label: str, test: float, look: ImageTransform, seed: int
) -> ImportedData:
    named = next(iter(parts.values())).class_names(label)
    found = {str(value): part.name for part in parts.values() for value in part.rows_[label]}
    known = tabular.Classes(tuple(named), integers=False) if named is not None else tabular.Classes.of(found, label)
    numbers = {name: number for number, name in enumerate(known.names)}

    def read(split: Split) -> Rows:
        x, y = [], []
        for position, row in enumerate(split.rows_):
            where = f"{split.name}, row {position + 1}"
            number = numbers.get(known.name_of(_text(row[label], named)))
            if number is None:
                raise InputError(f"{where}: {label} is {row[label]!r}, which is no class of the clients.")
            if row[image] is None:
                raise InputError(f"{where}: there is no {image}; take the row out.")
            x.append(look.prepare(row[image].convert("RGB")))
            y.append(number)
        return look.rows(np.stack(x)), np.array(y, dtype=np.int64)

    rows = {key: read(part) for key, part in parts.items()}
    train, tested = (rows, read(held)) if held is not None else split_off_test(rows, known.names, test, seed)
    return ImportedData(train, tested, known.names, (look.note, *notes_on_rows(train, tested, known.names)))

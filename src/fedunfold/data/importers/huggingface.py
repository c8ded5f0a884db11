"""A Hugging Face data set, from the hub or local files, partitioned over clients by flwr-datasets.

Needs the extra `datasets`. Nothing that a data set brings is executed: scripts are not supported by the library any
more, and its one builder that unpickles is refused here.
"""

import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.extras import HUB_ERRORS, import_extra
from fedunfold.data.importers import tabular
from fedunfold.data.importers.classes import Classes
from fedunfold.data.importers.csv import BLOCK_CELLS, guess_label
from fedunfold.data.importers.image_transform import ImageTransform
from fedunfold.data.importers.imported import Finding, ImportedData, Rows, client_keys, note_thin_data, split_off_test
from fedunfold.data.importers.partition_spec import PartitionSpec
from fedunfold.data.npz import first_line

if TYPE_CHECKING:
    from pandas import DataFrame

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
SMALLEST = 2  # rows of a client; Dirichlet draws again until every one has them


def _library(name: str) -> Any:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr-datasets is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return import_extra(name, "Hugging Face data sets need flwr-datasets; run: pip install 'fedunfold[datasets]'")


@dataclass(frozen=True)
class Split:
    """Rows of a data set; a table, unless there are images in it.

    Attributes:
        name: What messages call it.
        rows: The library's own data set.
    """

    name: str
    rows: Any

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.rows.column_names)

    @property
    def image(self) -> str | None:
        """The first column of images."""
        kind = _library("datasets").Image
        return next((name for name in self.columns if isinstance(self.rows.features[name], kind)), None)

    def class_names(self, column: str) -> list[str] | None:
        """Of a column that holds class numbers and knows their names."""
        feature = self.rows.features[column]
        return list(feature.names) if isinstance(feature, _library("datasets").ClassLabel) else None

    def findings(self) -> list[Finding]:
        return []

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> "Iterator[DataFrame]":
        names = {column: self.class_names(column) for column in columns}
        for column, named in names.items():
            if named is None and not isinstance(self.rows.features[column], _library("datasets").Value):
                raise InputError(f"{self.name}: column {column} holds no numbers or texts; `drop` it.")
        size = max(1, BLOCK_CELLS // len(columns))
        first = 1
        for block in self.rows.select_columns(list(columns)).to_pandas(batch_size=size, batched=True):
            for column, named in names.items():
                if named is not None:
                    block[column] = block[column].map(dict(enumerate(named)))
            block.index = range(first, first + len(block))
            first += len(block)
            yield block


@dataclass(frozen=True)
class HubData:
    """A data set's splits.

    Attributes:
        train: The rows to be partitioned over clients.
        test: The test set's, where there are some.
    """

    train: Split
    test: Split | None

    @classmethod
    def load(cls, name: str, test: str | None = None) -> "HubData":
        """Load a data set.

        Args:
            name: Its name on the hub, or a local file or folder.
            test: The split to test on, in place of ``test``.

        Returns:
            The splits.

        Raises:
            InputError: It cannot be loaded, or has no such split.
        """
        found = _load(name)
        train = "train" if "train" in found else next(iter(found))
        if test is not None and test not in found:
            raise InputError(f"`test`: {name} has no split {test}, only {', '.join(found)}; or give a fraction.")
        wanted = test or "test"
        held = Split(f"{name} ({wanted})", found[wanted]) if wanted in found and wanted != train else None
        return cls(Split(f"{name} ({train})", found[train]), held)

    def guess_label(self) -> str:
        """The first column with named classes, or the one whose name says so."""
        named = [column for column in self.train.columns if self.train.class_names(column) is not None]
        return named[0] if named else guess_label(self.train.columns)

    def partition(
        self,
        spec: PartitionSpec,
        clients: int | None,
        label: str,
        test: float,
        transform: ImageTransform | None,
        *,
        seed: int = 0,
        **columns: Unpack[tabular.ColumnOptions],
    ) -> ImportedData:
        """Partition the rows over clients and turn them into arrays.

        Args:
            spec: The partitioner.
            clients: How many clients there are; None where a column names them.
            label: The column that names the classes.
            test: The fraction of each client's rows to test on, where there is no split for it.
            transform: How images become rows; without images, all columns are treated as in a table.
            seed: Draws the partition and the test rows.
            **columns: About the columns of a table, as in `tabular.encode`.

        Returns:
            The arrays of all clients.

        Raises:
            InputError: A column is missing or of no use, or the rows cannot be partitioned so.
        """
        if label not in self.train.columns:
            raise InputError(f"`label`: {self.train.name} has no column {label}, only {', '.join(self.train.columns)}.")
        parts = _partition(self.train, spec, clients, label, seed)
        held = test if self.test is None else self.test
        image = self.train.image
        if image is not None and transform is not None:
            return _import_images(parts, held, image, label, transform, seed)
        # The column that named the clients would tell the model who they are.
        if spec.kind == "natural":
            columns["drop"] = [*columns.get("drop", ()), str(spec.value)]
        return tabular.encode(parts, held, label, seed=seed, **columns)


def _load(name: str) -> Any:
    datasets = _library("datasets")
    path = Path(name).expanduser()
    builder = BUILDERS.get(path.suffix.lower()) if path.is_file() else None
    if path.is_file() and builder is None:
        raise InputError(
            f"`dataset` {name}: is no data file; give one that ends in {', '.join(BUILDERS)}, or a folder."
        )
    builders = pkgutil.iter_modules(importlib.import_module("datasets.packaged_modules").__path__)
    if builder is None and not path.is_dir() and name in {module.name for module in builders}:
        raise InputError(f"`dataset` {name}: is a kind of file; give the path of the file or folder itself.")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for library in (datasets, importlib.import_module("huggingface_hub.utils")):
        library.logging.set_verbosity(50)  # the error says what went wrong
    try:
        if builder is not None:
            return datasets.load_dataset(builder, data_files={"train": str(path)})
        return datasets.load_dataset(str(path) if path.is_dir() else name)
    except HUB_ERRORS as error:
        raise InputError(
            f"`dataset` {name}: cannot be loaded ({first_line(error)}); check the name and the network, "
            "or give a local file or folder."
        ) from error


def _partition(train: Split, spec: PartitionSpec, clients: int | None, label: str, seed: int) -> dict[str, Split]:
    """Each client's rows, by key: client-0, client-1, …, or what the natural column calls them."""
    library = _library("flwr_datasets.partitioner")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # among the libraries below, of no use to the user
            made = _partitioner(library, spec, clients, label, seed)
            made.dataset = train.rows.shuffle(seed=seed)
            parts = [made.load_partition(i) for i in range(made.num_partitions)]
    except HUB_ERRORS as error:
        raise InputError(f"`partitioner` {spec.kind}: cannot divide {train.name} ({first_line(error)}).") from error
    natural = spec.kind == "natural"
    names = [str(made.partition_id_to_natural_id[i]) if natural else f"client-{i}" for i in range(len(parts))]
    by_name = dict(zip(names, parts, strict=True))
    for name, part in by_name.items():
        if not len(part):
            raise InputError(f"`partitioner` {spec.kind}: leaves {name} without a row; use fewer `clients`.")
    keys = client_keys({name: name for name in names}, f"`partitioner` natural:column={spec.value}")
    return {key: Split(f"{train.name} at {key}", by_name[name]) for key, name in keys.items()}


def _partitioner(library: Any, spec: PartitionSpec, clients: int | None, label: str, seed: int) -> Any:
    """The partitioner of flwr-datasets."""
    if spec.kind == "natural":
        return library.NaturalIdPartitioner(partition_by=spec.value)
    make = getattr(library, f"{spec.kind.capitalize()}Partitioner")
    if spec.value is None:
        return make(clients)
    options = {
        "dirichlet": {"alpha": spec.value, "min_partition_size": SMALLEST},
        "shard": {"num_shards_per_partition": spec.value},
        # Assigned in order, so that no class is left out where there is room for all.
        "pathological": {"num_classes_per_partition": spec.value, "class_assignment_mode": "first-deterministic"},
    }
    return make(num_partitions=clients, partition_by=label, seed=seed, **options[spec.kind])


def _import_images(
    parts: dict[str, Split], test: Split | float, image: str, label: str, transform: ImageTransform, seed: int
) -> ImportedData:
    named = next(iter(parts.values())).class_names(label)
    found = {str(value): part.name for part in parts.values() for value in part.rows[label]}
    classes = Classes.of(found, label, categorical=True) if named is None else Classes(tuple(named), integers=False)

    def read(split: Split) -> Rows:
        labels = _library("pandas").concat(split.blocks([label], ()))[label]
        x = []
        for number, picture in enumerate(split.rows[image], 1):
            if picture is None:
                raise InputError(f"{split.name}, row {number}: there is no {image}; take the row out.")
            x.append(transform.prepare(picture.convert("RGB")))
        return transform.rows(np.stack(x)), classes.number(labels, split.name)

    rows = {key: read(part) for key, part in parts.items()}
    given = test if isinstance(test, float) else read(test)
    train, tested = split_off_test(rows, classes.names, given, seed)
    notes = (transform.note, *note_thin_data(train, tested, classes.names))
    return ImportedData(train, tested, classes.names, notes)

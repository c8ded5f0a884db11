"""The source that `fedunfold env new` was given: which kind it is, and what is in it."""

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedunfold.cli import console
from fedunfold.cli.prompts import Answers
from fedunfold.core.errors import InputError
from fedunfold.core.registry import unknown
from fedunfold.core.task import TASKS, Task
from fedunfold.data.config import NpzSource, divide
from fedunfold.data.federated import FederatedData
from fedunfold.data.importers import image_folders, image_transform
from fedunfold.data.importers.classes import guess_task
from fedunfold.data.importers.csv import Table, csv_files, guess_label, look_at_files, scan_tables
from fedunfold.data.importers.huggingface import HubData
from fedunfold.data.importers.imported import Finding, ImportedData, client_key
from fedunfold.data.importers.partition_spec import PartitionSpec
from fedunfold.data.importers.tabular import encode, labels_in
from fedunfold.data.partitions import DirichletPartition, GivenPartition, IidPartition, Partition
from fedunfold.tasks.classification import Classification

Kind = Literal["npz", "tables", "images", "dataset"]
WORDS = {"npz": "an .npz file", "tables": "CSV files", "images": "image folders", "dataset": "a Hugging Face data set"}
OF_COLUMNS = ("drop", "categorical", "id", "positive", "missing_indicators", "scaling")
# Which options apply to which kind of source.
ABOUT: dict[str, tuple[Kind, ...]] = {
    "label": ("tables", "dataset"),
    "task": ("npz", "tables"),
    "time": ("tables",),
    "event": ("tables",),
    "test": ("tables", "images", "dataset"),
    **dict.fromkeys(OF_COLUMNS, ("tables", "dataset")),
    "size": ("images", "dataset"),
    "colour": ("images", "dataset"),
    "model": ("images", "dataset"),
    "partitioner": ("npz", "dataset"),
    "clients": ("npz", "dataset"),
}
TEST_FRACTION = 0.2
TABLE_TASKS = ("classification", "binary", "regression", "survival")


@dataclass(frozen=True, eq=False)
class ImportSummary:
    """What an environment needs to know about the data: arrays to write, or an .npz that stays where it is."""

    data: FederatedData
    path: str
    partition: Partition
    classes: tuple[str, ...]
    imported: ImportedData | None = None
    notes: tuple[str, ...] = ()
    task: Task | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What may be a mistake in the data."""
        return () if self.imported is None else self.imported.findings


@dataclass(frozen=True)
class ImportSource:
    """Where the data are, and the options given about them."""

    kind: Kind
    place: str
    given: Mapping[str, Any]
    answers: Answers
    seed: int

    @classmethod
    def of(
        cls, source: Path | None, dataset: str | None, given: Mapping[str, Any], answers: Answers, seed: int
    ) -> "ImportSource":
        kind = _kind(source, dataset)
        chosen = {option: value for option, value in given.items() if value not in (None, [], False)}
        for option in chosen:
            if kind not in ABOUT[option]:
                about = " or ".join(WORDS[other] for other in ABOUT[option])
                raise InputError(f"--{option.replace('_', '-')} is about {about}; leave it out for {WORDS[kind]}.")
        return cls(kind, str(source) if dataset is None else dataset, chosen, answers, seed)

    def default_name(self) -> str:
        return self.file_name(Path(self.place).expanduser().resolve().stem)

    @staticmethod
    def file_name(name: str) -> str:
        return client_key(name) or "mine"

    def find(self, out: Path) -> ImportSummary:
        """Read everything, for an environment file `out`."""
        if self.kind == "npz":
            return self._npz(out)
        label, imported = {"tables": self._tables, "images": self._images, "dataset": self._dataset}[self.kind]()
        imported = replace(imported, notes=(_on_target(label, imported), *imported.notes))
        classes = len(imported.classes) or None
        data = FederatedData.from_clients(imported.clients, imported.test, classes, imported.task)  # the last checks
        path = out.with_suffix(".npz").name
        return ImportSummary(data, path, GivenPartition(), imported.classes, imported, imported.notes, imported.task)

    def _npz(self, out: Path) -> ImportSummary:
        path = Path(self.place)
        keys = _npz_clients(path)
        partition: Partition = GivenPartition()
        if keys is None:
            spec, count = self._partition_spec()
            keys = tuple(f"client-{k}" for k in range(count))
            if spec.kind == "iid":
                partition = IidPartition(seed=self.seed)
            elif spec.kind == "dirichlet":
                partition = DirichletPartition(alpha=spec.value, seed=self.seed)
            else:
                raise InputError(
                    "--partitioner: an .npz is partitioned by iid or dirichlet:alpha=0.3, or by editing the file."
                )
        elif option := next((name for name in self.given if name != "task"), None):
            raise InputError(f"--{option}: {path} has arrays for each client, so it is divided; leave it out.")
        task = None if self.given.get("task") in (None, "classification") else TASKS.make(self.given["task"])
        data = divide(NpzSource(path=str(path.resolve())), partition, keys, Path(), task=task)
        classes = tuple(str(c) for c in range(data.classes if data.classes > 1 else 0))
        return ImportSummary(data, os.path.relpath(path, out.parent), partition, classes, task=task)

    def _tables(self) -> tuple[str, ImportedData]:
        given = self._given_test()
        clients, held = scan_tables(Path(self.place), Path(given) if isinstance(given, str) else None)
        if isinstance(given, float) and held is not None:
            raise InputError(f"--test: {held.name} is the test set; leave out the fraction, or move the file.")
        columns = next(iter(clients.values())).columns
        name, label = self._target(columns, list(clients.values()))
        test = held if held is not None else self._fraction(given)
        task = None if name == "classification" else TASKS.make(name)
        made = encode(clients, test, label, task=task, seed=self.seed, **self._of_columns())
        named = label if isinstance(label, str) else " and ".join(label)
        findings = (*look_at_files(Path(self.place)), *made.findings)
        return named, replace(made, task=task or Classification(len(made.classes)), findings=findings)

    def _target(self, columns: Sequence[str], tables: Sequence[Table]) -> tuple[str, str | tuple[str, str]]:
        """The task, and the column or columns to predict."""
        task: str | None = self.given.get("task")
        if task is None and ("time" in self.given or "event" in self.given):
            task = "survival"
        if task != "survival":
            label = self._label(guess_label(columns), columns)
            if task is None:
                question = f"task ({', '.join(TABLE_TASKS)})"
                guess = guess_task(labels_in(tables, label), classes=label in self.given.get("categorical", ()))
                task = self.answers.about("--task", question, None, guess, _task)
            if task != "survival":
                for option in {"time", "event"} & self.given.keys():
                    raise InputError(f"--{option} is about survival; leave it out for {task}.")
                return task, label
        elif "label" in self.given:
            raise InputError("--label: survival is predicted from --time and --event; leave it out.")
        by_name = {column.lower(): column for column in columns}
        about = self.answers.about
        time = about("--time", "column of the times", self.given.get("time"), by_name.get("time"), str)
        event = about("--event", "column of the events, 0 or 1", self.given.get("event"), by_name.get("event"), str)
        return task, (time, event)

    def _images(self) -> tuple[str, ImportedData]:
        root, given = Path(self.place), self._given_test()
        own = next((path for path in image_folders.subfolders(root) if path.name.lower() == image_folders.TEST), None)
        if isinstance(given, float) and own is not None:
            raise InputError(f"--test: {own} is the test set; leave out the fraction, or move the folder.")
        test = Path(given) if isinstance(given, str) else own if own is not None else self._fraction(given)
        with console.progress() as bars:
            task = bars.add_task("images", total=None, note="")

            def show(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            made = image_folders.import_images(root, self._image_transform(), test, seed=self.seed, on_progress=show)
        return "class folders", made

    def _dataset(self) -> tuple[str, ImportedData]:
        spec, count = self._partition_spec()
        given = self._given_test()
        data = HubData.load(self.place, given if isinstance(given, str) else None)
        if isinstance(given, float):
            data = replace(data, test=None)
        label = self._label(data.guess_label(), data.train.columns)
        fraction = self._fraction(given) if data.test is None else TEST_FRACTION
        images = data.train.image is not None
        for option in ("size", "colour", "model") if not images else OF_COLUMNS:
            if option in self.given:
                raise InputError(
                    f"--{option.replace('_', '-')}: does not apply to {'images' if images else 'tables'}; leave it out."
                )
        made = data.partition(
            spec,
            None if spec.kind == "natural" else count,
            label,
            fraction,
            self._image_transform() if images else None,
            seed=self.seed,
            **self._of_columns(),
        )
        return label, made

    def _of_columns(self) -> dict[str, Any]:
        return {option: self.given[option] for option in OF_COLUMNS if option in self.given}

    def _given_test(self) -> float | str | None:
        """The fraction or the place that --test names."""
        text = self.given.get("test")
        try:
            return None if text is None else float(text)
        except ValueError:
            return str(text)

    def _fraction(self, given: float | str | None) -> float:
        fraction = given if isinstance(given, float) else None
        return self.answers.about("--test", "part of each client's rows to test on", fraction, TEST_FRACTION, float)

    def _label(self, guess: str, columns: Sequence[str]) -> str:
        question = f"column to predict ({', '.join(columns)})"
        given: str | None = self.given.get("label")
        return self.answers.about("--label", question, given, guess, str)

    def _partition_spec(self) -> tuple[PartitionSpec, int]:
        given = self.given.get("partitioner")
        question = "how rows are partitioned over clients, such as iid or dirichlet:alpha=0.3"
        parse = PartitionSpec.parse
        chosen = self.answers.about("--partitioner", question, given and parse(given), None, parse)
        if chosen.kind == "natural":
            if "clients" in self.given:
                raise InputError("--clients: the natural partitioner takes them from its column; leave it out.")
            return chosen, 0
        return chosen, self.answers.about("--clients", "how many clients", self.given.get("clients"), None, int)

    def _image_transform(self) -> image_transform.ImageTransform:
        if "model" not in self.given:
            return image_transform.pixels(self.given.get("size", 28), self.given.get("colour", "grey"))
        for option in ("size", "colour"):
            if option in self.given:
                raise InputError(f"--{option} is about pixels; leave it out beside --model.")
        return image_transform.backbone(self.given["model"])


def _kind(source: Path | None, dataset: str | None) -> Kind:
    if (source is None) == (dataset is None):
        raise InputError(
            "give a SOURCE (an .npz, a folder of CSV files or of image folders) or --dataset, one of them."
        )
    if source is None:
        return "dataset"
    if not source.exists():
        raise InputError(f"{source} does not exist; check the path.")
    if source.is_file():
        if source.suffix.lower() == ".npz":
            return "npz"
        hint = (
            "a folder with one CSV file for each client" if source.suffix.lower() == ".csv" else "an .npz or a folder"
        )
        raise InputError(f"{source} is a single file of another kind; give {hint}.")
    if csv_files(source):
        return "tables"
    if image_folders.subfolders(source):
        return "images"
    raise InputError(f"{source} has neither CSV files nor folders of images (client/class/…); check the path.")


def _npz_clients(path: Path) -> tuple[str, ...] | None:
    """The clients that an .npz has arrays for, or None where it has x_train and is still to be divided."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not an .npz file or is cut short; make it again.") from error
    if "x_train" in names:
        return None
    return tuple(sorted(name[2:] for name in names if name.startswith("x_") and name != "x_test"))


def _task(text: str) -> str:
    """A task as it is typed."""
    if text not in TABLE_TASKS:
        raise InputError(unknown("task", text, TABLE_TASKS))
    return text


def _on_target(label: str, made: ImportedData) -> str:
    if made.task is not None and not made.classes:
        return f"{made.task.name} of {label}."
    names = ", ".join(made.classes[:8]) + (", …" if len(made.classes) > 8 else "")
    return f"{len(made.classes)} classes from {label}: {names}."

"""Samples that stay where they are: any `torch.utils.data.Dataset` per client, of which only minibatches are read."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from fedunfold.core.errors import InputError
from fedunfold.core.task import Task
from fedunfold.data.arrays import Inputs, map_inputs, tensors

FINGERPRINT_ROWS = 16
"""Of every data set, evenly spaced, that stand for all of them."""
Collate = Callable[[list[Any]], Any]


class DatasetRows:
    """The rows of several data sets, one data set after the other, read by their numbers.

    A data set gives (x, y) for every index, or a dict in which `target` is y; x may itself be a dict of tensors. Floats
    become float32. One tensor of whole numbers becomes float32 too, bytes x/255 (as arrays in memory do), unless the
    task's inputs are ids; tensors by name stay whole numbers.

    Args:
        datasets: By name, in this order; map-style, or an IterableDataset that has a length.
        task: What a model is trained for.
        collate: Makes a minibatch of a list of samples; torch's `default_collate` without it.
        target: The name of y where samples are dicts.
        workers: Processes that read ahead.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        task: Task,
        *,
        collate: Collate | None = None,
        target: str | None = None,
        workers: int = 0,
    ) -> None:
        if not datasets:
            raise InputError("There are no clients; give at least one with its data set.")
        self.names, self._task, self._collate, self._target = tuple(datasets), task, collate, target
        self._workers = workers
        self._sets = [_Indexed(found, name) for name, found in datasets.items()]
        self.sizes = tuple(len(found) for found in self._sets)
        self._ends = list(accumulate(self.sizes))
        self.can_be_read_again = not any(isinstance(found, IterableDataset) for found in datasets.values())
        """Whether a row is the same each time: an IterableDataset gives whatever comes next."""
        self._batches = _Batches()
        self._loader: DataLoader[Any] = DataLoader(
            _Joined(self._sets, self._ends),
            batch_sampler=self._batches,
            num_workers=workers if self.can_be_read_again else 0,
            collate_fn=collate or default_collate,
            persistent_workers=workers > 0 and self.can_be_read_again,
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def take(self, rows: np.ndarray) -> "DatasetRows":
        """Some rows, in ascending order, as data sets of their own; one without any is left out."""
        if not self.can_be_read_again:
            raise InputError("the rows of an IterableDataset cannot be divided; give a Dataset that is read by index.")
        owners = np.searchsorted(self._ends, rows, side="right")
        parts = {
            self.names[k]: _Part(self._sets[k].dataset, rows[owners == k] - self._ends[k] + self.sizes[k])
            for k in np.unique(owners)
        }
        return DatasetRows(parts, self._task, collate=self._collate, target=self._target, workers=self._workers)

    def pooled(self, name: str) -> "DatasetRows":
        """All rows as one data set."""
        if not self.can_be_read_again:
            raise InputError("the rows of an IterableDataset cannot be pooled; give a Dataset that is read by index.")
        whole: Dataset[Any] = ConcatDataset([found.dataset for found in self._sets])
        return DatasetRows({name: whole}, self._task, collate=self._collate, target=self._target, workers=self._workers)

    def read(self, rows: np.ndarray) -> tuple[Inputs, Tensor]:
        """Some rows, in this process."""
        joined = _Joined(self._sets, self._ends)
        return self._checked((self._collate or default_collate)([joined[int(row)] for row in rows]), rows)

    def stream(self, batches: Sequence[np.ndarray]) -> Iterator[tuple[Inputs, Tensor]]:
        """Several minibatches one after the other, read ahead by the workers."""
        self._batches.rows = batches
        for rows, read in zip(batches, self._loader, strict=True):
            yield self._checked(read, rows)

    def targets(self, k: int) -> Tensor | None:
        """All targets of one data set, where it has them at hand (`targets`, as torchvision's have)."""
        found = getattr(self._sets[k].dataset, "targets", None)
        if found is None:
            return None
        return torch.from_numpy(self._task.check_targets(np.asarray(found), f"y of {self.names[k]}"))

    def checksum(self) -> str:
        """Stands for the rows: their number, and some of them."""
        found = hashlib.sha256(repr((self.names, self.sizes)).encode())
        for end, size in zip(self._ends, self.sizes, strict=True):
            if self.can_be_read_again:
                x, y = self.read(np.unique(np.linspace(end - size, end - 1, FINGERPRINT_ROWS).astype(np.int64)))
                for part in (*tensors(x), y):
                    found.update(part.contiguous().numpy().tobytes())
        return found.hexdigest()

    def _checked(self, read: Any, rows: np.ndarray) -> tuple[Inputs, Tensor]:
        """A minibatch as inputs and targets of the task."""
        name = self.names[int(np.searchsorted(self._ends, int(rows[0]), side="right"))]
        if self._target is not None:
            if not isinstance(read, Mapping) or self._target not in read:
                raise InputError(f"the samples of {name} are no dicts with '{self._target}'; name the target's key.")
            rest = {key: value for key, value in read.items() if key != self._target}
            read = (rest if len(rest) > 1 else next(iter(rest.values()), None)), read[self._target]
        if not (isinstance(read, list | tuple) and len(read) == 2):
            raise InputError(f"a sample of {name} is not a pair (x, y); give pairs, or dicts and the target's key.")
        x, y = read
        parts = list(x.values()) if isinstance(x, Mapping) else [x]
        if not parts or not all(isinstance(part, Tensor) and len(part) == len(rows) for part in (*parts, y)):
            raise InputError(f"a minibatch of {name} is not made of tensors with a row for every sample.")
        if not all(part.isfinite().all() for part in parts if part.is_floating_point()):
            raise InputError(f"x of {name} has a NaN or infinite value; fill it in or drop the sample.")
        keeps = isinstance(x, Mapping) or self._task.keeps_integers
        targets = torch.from_numpy(self._task.check_minibatch(y.numpy(), f"y of {name}"))
        return map_inputs(lambda part: _as_input(part, keeps_integers=keeps), x), targets


class _Indexed:
    """A data set by index; of an iterable one the next sample, whatever the index."""

    def __init__(self, dataset: Any, name: str) -> None:
        if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
            raise InputError(f"{name} is no data set; give it a torch.utils.data.Dataset.")
        try:
            size = len(dataset)
        except TypeError as error:
            raise InputError(f"the data set of {name} has no length; give it a __len__.") from error
        if size < 1:
            raise InputError(f"the data set of {name} is empty; give at least one sample or leave it out.")
        self.dataset, self._size, self._name = dataset, size, name
        self._next: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not isinstance(self.dataset, IterableDataset):
            return self.dataset[index]
        for _ in range(2):
            if self._next is None:
                self._next = iter(self.dataset)
            try:
                return next(self._next)
            except StopIteration:
                self._next = None
        raise InputError(f"the data set of {self._name} has a length of {self._size} and gives no sample.")


class _Part(Dataset[Any]):
    """Some rows of a data set, with their targets where it has them at hand."""

    def __init__(self, dataset: Any, rows: np.ndarray) -> None:
        self._dataset, self._rows = dataset, rows
        known = getattr(dataset, "targets", None)
        self.targets = None if known is None else np.asarray(known)[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._rows[index])]


class _Joined(Dataset[Any]):
    """Several data sets one after the other."""

    def __init__(self, sets: Sequence[_Indexed], ends: Sequence[int]) -> None:
        self._sets, self._ends = sets, ends

    def __getitem__(self, row: int) -> Any:
        which = int(np.searchsorted(self._ends, row, side="right"))
        return self._sets[which][row - self._ends[which] + len(self._sets[which])]


class _Batches(Sampler[list[int]]):
    """Minibatches that are set before each pass."""

    rows: Sequence[np.ndarray] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _as_input(part: Tensor, *, keeps_integers: bool) -> Tensor:
    if part.is_floating_point():
        return part.float()
    if keeps_integers:
        return part if part.dtype == torch.bool else part.long()
    return part.float() / 255 if part.dtype == torch.uint8 else part.float()


def in_memory(inputs: Inputs | DatasetRows) -> Inputs:
    """Inputs that are, refused where they are read from data sets."""
    if isinstance(inputs, DatasetRows):
        raise InputError("this needs samples in memory, and they are read from data sets; give arrays.")
    return inputs

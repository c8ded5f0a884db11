"""What a federation trains and tests on, checked once and then trusted by every engine."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.core.task import Task
from fedunfold.data.arrays import Arrays, Inputs, all_inputs, as_array, joined, single, take, tensors
from fedunfold.data.datasets import DatasetRows, in_memory
from fedunfold.io.limits import CLASSES
from fedunfold.tasks.classification import Classification, class_numbers


@dataclass(frozen=True, eq=False)
class FederatedData:
    """All clients' samples in two tensors, one client after the other, and a test set none of them has.

    Attributes:
        keys: The clients.
        inputs: Samples of all clients, float32 [N, *features], or several tensors by name, or data sets.
        y: Their targets [N, …]; class numbers are int64. Empty where they come with the rows of data sets.
        offsets: Client k owns rows offsets[k]:offsets[k+1].
        test_inputs: Samples of the test set.
        y_test: Their targets.
        task: What a model is trained for.
        server: Samples and targets that the server holds itself; None where it holds none.
    """

    keys: tuple[str, ...]
    inputs: Inputs | DatasetRows
    y: Tensor
    offsets: tuple[int, ...]
    test_inputs: Inputs | DatasetRows
    y_test: Tensor
    task: Task
    server: tuple[Inputs | DatasetRows, Tensor] | None = None

    def __repr__(self) -> str:
        """Counts only: samples of a federation have no business in a log."""
        return f"FederatedData(clients={len(self.keys)}, samples={self.offsets[-1]}, task={self.task.name})"

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[str, tuple[Arrays, ArrayLike]],
        test: tuple[Arrays, ArrayLike],
        classes: int | None = None,
        task: Task | None = None,
        server: tuple[Arrays, ArrayLike] | None = None,
    ) -> "FederatedData":
        """Check and join the arrays of all clients.

        Args:
            clients: (x, y) by client, in the order that the federation has; x may be several arrays by name.
            test: (x, y) of the test set.
            classes: The number of classes; without it, the highest label plus one.
            task: What a model is trained for; without it, classification.
            server: (x, y) that the server holds itself.

        Returns:
            The checked data.

        Raises:
            InputError: An array cannot be used; the message names its client.
        """
        if not clients:
            raise InputError("There are no clients; give at least one with its x and y.")
        owners = {f"client {key}": pair for key, pair in clients.items()} | {"the test set": test}
        if server is not None:
            owners["the server"] = server
        for owner, pair in owners.items():
            if len(pair) != 2:
                raise InputError(f"{owner} has {len(pair)} arrays; give it a pair (x, y).")
        keep_integers = task is not None and task.keeps_integers
        x = all_inputs({f"x of {owner}": pair[0] for owner, pair in owners.items()}, keep_integers=keep_integers)
        y: dict[str, np.ndarray] = {}
        for (owner, pair), rows in zip(owners.items(), x, strict=True):
            y[f"y of {owner}"] = values = as_array(pair[1], f"y of {owner}")
            if values.shape[:1] != (count := len(next(iter(rows.values()))),):
                raise InputError(
                    f"y of {owner} has shape {values.shape} but its x has {count} rows; give one label a row."
                )
        task = task or _classification(y, classes)
        if isinstance(task, Classification):
            CLASSES.check(task.classes, "The labels make too many classes: ")
        targets = [task.check_targets(values, name) for name, values in y.items()]
        count, offsets = len(clients), _offsets([len(part) for part in targets[: len(clients)]])

        def rows_of(first: int, end: int) -> tuple[Inputs, Tensor]:
            return joined(x[first:end]), torch.from_numpy(np.concatenate(targets[first:end]))

        own = None if server is None else rows_of(count + 1, count + 2)
        return cls(tuple(clients), *rows_of(0, count), offsets, *rows_of(count, count + 1), task, own)

    @classmethod
    def from_datasets(
        cls,
        keys: tuple[str, ...],
        clients: DatasetRows,
        test: DatasetRows,
        task: Task,
        server: DatasetRows | None = None,
    ) -> "FederatedData":
        """Data sets that stay where they are, those of all clients together; arguments as in `from_clients`."""
        empty = torch.empty(0)
        own = None if server is None else (server, empty)
        return cls(keys, clients, empty, _offsets(list(clients.sizes)), test, empty, task, own)

    @property
    def sizes(self) -> tuple[int, ...]:
        """N_k."""
        return tuple(np.diff(self.offsets).tolist())

    @cached_property
    def label_counts(self) -> Tensor:
        """How many samples of group g, a class, client k has, int64 [K, G]; one group without classes.

        Of data sets that do not have their targets at hand all samples are read for it.
        """
        if isinstance(self.inputs, DatasetRows):
            return torch.stack([self._counted(k) for k in range(len(self.keys))])
        owner = torch.arange(len(self.keys)).repeat_interleave(torch.tensor(self.sizes))
        groups = self.task.num_groups
        cells = torch.bincount(owner * groups + self.task.groups(self.y), minlength=len(self.keys) * groups)
        return cells.reshape(len(self.keys), groups)

    @property
    def known_label_counts(self) -> Tensor:
        """The same, and an empty row for every client [K, 0] where data sets would have to be read for it."""
        rows = self.inputs
        if isinstance(rows, DatasetRows) and any(rows.targets(k) is None for k in range(len(self.keys))):
            return torch.empty(len(self.keys), 0, dtype=torch.int64)
        return self.label_counts

    def _counted(self, k: int) -> Tensor:
        rows = self.inputs
        assert isinstance(rows, DatasetRows)
        if self.task.num_groups == 1:
            return torch.tensor([self.sizes[k]])
        if (targets := rows.targets(k)) is not None:
            return torch.bincount(self.task.groups(targets), minlength=self.task.num_groups)
        numbers = np.arange(self.offsets[k], self.offsets[k + 1])
        parts = rows.stream(np.array_split(numbers, -(-len(numbers) // 1024)))
        counts = [torch.bincount(self.task.groups(y), minlength=self.task.num_groups) for _, y in parts]
        return torch.stack(counts).sum(0)

    @property
    def classes(self) -> int:
        """How many groups of samples, the classes, there are; 1 for a task without classes."""
        return self.task.num_groups

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of a sample, where it is one tensor."""
        if isinstance(self.inputs, DatasetRows):
            return tuple(single(self.inputs.read(np.zeros(1, dtype=np.int64))[0]).shape[1:])
        if not isinstance(self.inputs, Tensor):
            names = ", ".join(self.inputs)
            raise InputError(f"The inputs {names} need a model of your own; pass a function that builds it.")
        return tuple(self.inputs.shape[1:])

    @property
    def x(self) -> Tensor:
        """The samples of all clients, where they are one tensor."""
        return single(in_memory(self.inputs))

    @property
    def x_test(self) -> Tensor:
        """The samples of the test set, where they are one tensor."""
        return single(in_memory(self.test_inputs))

    @cached_property
    def checksum(self) -> str:
        """Stands for every sample and who holds it."""
        found = hashlib.sha256(repr((self.keys, self.offsets, self.task.describe())).encode())
        others = () if self.server is None else (self.server,)
        for inputs, y in ((self.inputs, self.y), (self.test_inputs, self.y_test), *others):
            if isinstance(inputs, DatasetRows):
                found.update(inputs.checksum().encode())
                continue
            for part in (*tensors(inputs), y):
                found.update(part.contiguous().numpy().data)
        return found.hexdigest()

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """(x, y) of client k, as views."""
        rows = slice(self.offsets[k], self.offsets[k + 1])
        return self.x[rows], self.y[rows]

    def restricted(self, fraction: float, seed: int) -> "FederatedData":
        """Leave every client ⌈fraction · N_k⌉ of its rows, drawn by (seed, its key), in their old order.

        Args:
            fraction: The part that is left.
            seed: Draws the rows.

        Returns:
            The same federation with fewer samples.
        """
        if not 0 < fraction <= 1:
            raise InputError(f"The fraction of data used must lie in (0, 1], not {fraction}.")
        return self if fraction == 1 else self._with_rows(self._drawn(fraction, seed, "fraction"))

    def held_out(self, fraction: float, seed: int) -> "FederatedData":
        """Make a part of every client's rows the test set.

        For choosing among settings: the real test set stays unseen.

        Args:
            fraction: The part of each client's rows.
            seed: Draws them.

        Returns:
            The same federation with fewer training samples and another test set.
        """
        if not 0 < fraction < 1:
            raise InputError(f"The fraction of data held out must lie in (0, 1), not {fraction}.")
        train = self._drawn(1 - fraction, seed, "held-out")
        test = np.setdiff1d(np.arange(self.offsets[-1]), np.concatenate(train))
        if not len(test):
            raise InputError(f"Holding out {fraction} of such small clients leaves nothing to test on; hold out more.")
        return self._with_rows(train)._tested_on(self, test)

    def split(self, fraction: float, seed: int = 0) -> tuple["FederatedData", "FederatedData"]:
        """Part every client's rows in two: what it trains on, and what it is tested on by itself.

        Args:
            fraction: The part of each client's rows in the second, rounded; at least one row is in either.
            seed: Draws them, by client.

        Returns:
            Two federations of the same clients and the same test set.

        Raises:
            InputError: A client has a single row.
        """
        kept, held = [], []
        for key, start, size in zip(self.keys, self.offsets, self.sizes, strict=False):
            if size < 2:
                raise InputError(f"Client {key} has a single row, of which none can be held out; leave the client out.")
            count = min(max(1, math.floor(round(fraction * size, 9) + 0.5)), size - 1)
            rows = start + generator(seed, "holdout", key).permutation(size)
            held.append(np.sort(rows[:count]))
            kept.append(np.sort(rows[count:]))
        return self._with_rows(kept), self._with_rows(held)

    def with_server_rows(self, count: int) -> "FederatedData":
        """Give some of the clients' rows to the server, drawn among all of them; no client keeps them.

        Args:
            count: How many; every client keeps at least one row.

        Raises:
            InputError: The clients have fewer to give, or the server has data already.
        """
        if self.server is not None:
            raise InputError("field server_rows: the server has data already; leave server_rows or those out.")
        order = generator(0, "server").permutation(self.offsets[-1])
        # The first row of each client in this order stays with it.
        _, stays = np.unique(np.searchsorted(self.offsets, order, side="right"), return_index=True)
        given = np.sort(np.delete(order, stays)[:count])
        if len(given) < count:
            raise InputError(f"field server_rows: the clients have {len(given)} rows to give; take that many or fewer.")
        kept = [np.setdiff1d(np.arange(*span), given, assume_unique=True) for span in pairwise(self.offsets)]
        return replace(self._with_rows(kept), server=self._taken(given))

    def without(self, key: str) -> "FederatedData":
        """Leave a client out, and make its rows the test set.

        Args:
            key: The client.

        Returns:
            The federation of the others.
        """
        k, spans = self.keys.index(key), list(pairwise(self.offsets))
        own = np.arange(*spans.pop(k))
        keys = (*self.keys[:k], *self.keys[k + 1 :])
        others = replace(self._with_rows([np.arange(*span) for span in spans]), keys=keys)
        return others._tested_on(self, own)

    def only(self, key: str) -> "FederatedData":
        """A federation of one client alone, with the same test set.

        Args:
            key: The client.
        """
        k = self.keys.index(key)
        return replace(self._with_rows([np.arange(self.offsets[k], self.offsets[k + 1])]), keys=(key,))

    def pooled(self, key: str) -> "FederatedData":
        """All rows in one place, in their order: a federation of one client, with the same test set.

        Args:
            key: What the client is called.
        """
        inputs = self.inputs.pooled(f"client {key}") if isinstance(self.inputs, DatasetRows) else self.inputs
        return replace(self, keys=(key,), inputs=inputs, offsets=(0, self.offsets[-1]))

    def _drawn(self, fraction: float, seed: int, purpose: str) -> list[np.ndarray]:
        """⌈fraction · N_k⌉ rows of every client."""
        drawn = []
        for key, start, size in zip(self.keys, self.offsets, self.sizes, strict=False):
            # Rounding first: 0.1 · 30 is a hair above 3 in floating point and would draw a fourth row.
            count = max(1, math.ceil(round(fraction * size, 9)))
            drawn.append(start + np.sort(generator(seed, purpose, key).permutation(size)[:count]))
        return drawn

    def _with_rows(self, rows: list[np.ndarray]) -> "FederatedData":
        """The same with these rows of every client only."""
        inputs, y = self._taken(np.concatenate(rows))
        return replace(self, inputs=inputs, y=y, offsets=_offsets([len(part) for part in rows]))

    def _tested_on(self, whole: "FederatedData", rows: np.ndarray) -> "FederatedData":
        """The same with some training rows of a whole federation as the test set."""
        inputs, y = whole._taken(rows)
        return replace(self, test_inputs=inputs, y_test=y)

    def _taken(self, rows: np.ndarray) -> tuple[Inputs | DatasetRows, Tensor]:
        """Some training rows with their targets."""
        if isinstance(self.inputs, DatasetRows):
            return self.inputs.take(rows), self.y
        chosen = torch.from_numpy(rows)
        return take(self.inputs, chosen), self.y[chosen]


def _classification(named: Mapping[str, np.ndarray], classes: int | None) -> Classification:
    """Of as many classes as there are labels."""
    checked = [class_numbers(values, name, classes) for name, values in named.items()]
    for name, values in named.items():
        if values.ndim != 1:
            raise InputError(f"{name} has shape {values.shape}; give one label a row.")
    return Classification(1 + max(int(part.max()) for part in checked) if classes is None else classes)


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    return (0, *(int(end) for end in np.cumsum(sizes)))

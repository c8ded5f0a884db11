"""The minibatches of a round: drawn on the host, uploaded to where local training runs, and read there."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.config.clock import client_times
from fedunfold.core.messages import Metric
from fedunfold.core.participation import Participation, RoundRng, epochs_at
from fedunfold.core.parts import CLIENT_SAMPLERS
from fedunfold.data.arrays import Inputs, cast, map_inputs, take, tensors
from fedunfold.data.datasets import DatasetRows
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan
from fedunfold.engines.simulation.backends.cpu.permutations import last_rows, shuffle_rows

SMALL = 64 * 1024
"""Bytes that go to a GPU's queue as they are. For more the device would have to be waited for, unless they lie in
memory that it can reach by itself."""


def upload(values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device; numpy's memory is read before this returns, and what the device is doing is not waited for."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    host = host.to(dtype or host.dtype)
    if device.type == "cuda" and host.nbytes > SMALL:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class ClientSlice:
    """One client's rows in a round.

    Attributes:
        client_id: The client.
        start: Its first row.
        size: N_k, how many it has.
        epochs: E_k.
    """

    client_id: str
    start: int
    size: int
    epochs: int

    def steps(self, batch_size: int) -> int:
        """τ_k = E_k ⌈N_k/B⌉."""
        return self.epochs * -(-self.size // batch_size)


@dataclass(frozen=True, eq=False)
class ClientSlices:
    """All clients' rows in a round, as arrays: of many clients few train.

    Attributes:
        client_ids: The clients.
        starts: Their first rows, [K].
        sizes: N_k, [K].
        epochs: E_k, [K].
    """

    client_ids: tuple[str, ...]
    starts: np.ndarray
    sizes: np.ndarray
    epochs: np.ndarray

    def __len__(self) -> int:
        return len(self.client_ids)

    def __getitem__(self, k: int) -> ClientSlice:
        return ClientSlice(self.client_ids[k], int(self.starts[k]), int(self.sizes[k]), int(self.epochs[k]))

    def steps(self, batch_size: int) -> np.ndarray:
        """τ_k, [K]."""
        return np.asarray(self.epochs * -(-self.sizes // batch_size))


Clients = Sequence[tuple[RoundRng, ClientSlice]]
"""Of each client the randomness of its round, and its rows."""


@dataclass(frozen=True)
class BatchPlan:
    """Minibatches of several clients, each in a slot of its own, clients with more steps first.

    Attributes:
        order: The client in each slot.
        active: How many slots, the first ones, still train at each step.
        rows: Rows of the data, [S, L, B].
        counts: How many of them are real, [S, L].
        clients: Each slot's randomness and client.
    """

    order: tuple[int, ...]
    active: tuple[int, ...]
    rows: np.ndarray
    counts: np.ndarray
    clients: Sequence[tuple[RoundRng, str]]

    def upload(self, device: torch.device, dtype: torch.dtype) -> "DeviceBatchPlan":
        """The plan where local training runs."""
        rows, counts = upload(self.rows, device), upload(self.counts, device)[..., None]
        real = torch.arange(self.rows.shape[2], device=device) < counts
        means = real.to(dtype) / counts.clamp(min=1)
        return DeviceBatchPlan(self.order, self.active, rows, self.counts, means, self.clients)


def plan_batches(clients: Clients, batch_size: int, width: int, threads: int = 1) -> BatchPlan:
    """The minibatches of clients in a round, or in a round of several runs: every epoch is reshuffled, and its last
    minibatch short.

    Args:
        clients: Their randomness and rows.
        batch_size: B.
        width: The number of rows that minibatches are padded to, whoever participates.
        threads: How many may draw them.
    """
    order = sorted(range(len(clients)), key=lambda i: -clients[i][1].steps(batch_size))
    ordered = [clients[index] for index in order]
    shape = ordered[0][1].steps(batch_size), len(order)
    rows, counts = np.empty((*shape, width), dtype=np.int32), np.zeros(shape, dtype=np.int32)
    rows[:] = np.array([own.start for _, own in ordered], dtype=np.int32)[:, None]
    epochs = []
    for slot, (_, own) in enumerate(ordered):
        steps = own.steps(batch_size)
        per_epoch = steps // own.epochs
        epochs += [(slot, first, own.size) for first in range(0, steps, per_epoch)]
        counts[:steps, slot] = np.tile(np.minimum(width, own.size - width * np.arange(per_epoch)), own.epochs)
    shuffle_rows(rows, _keys(ordered), np.array(epochs), threads)
    slots = [(rng, own.client_id) for rng, own in ordered]
    return BatchPlan(tuple(order), tuple((counts > 0).sum(1).tolist()), rows, counts, slots)


def sample_coefficients(clients: Clients, batch_size: int) -> np.ndarray:
    """Σ_e 1/|b_e(i)| of every sample i, one client after the other: how often and how much it counts when all
    minibatches of a round meet the same model.

    That is E_k/B, and more for those that came into a short minibatch, the last of an epoch.
    """
    sizes = np.array([own.size for _, own in clients])
    epochs = np.array([own.epochs for _, own in clients])
    width = min(batch_size, int(sizes.max()))
    size, begin = np.repeat(sizes, epochs), np.repeat(np.cumsum(sizes) - sizes, epochs)
    short = size % width
    rows = np.repeat(begin, short) + last_rows(size, short, _keys(clients))
    more = np.repeat(1 / np.maximum(short, 1) - 1 / width, short)
    return np.repeat(epochs / width, sizes) + np.bincount(rows, more, sizes.sum())


def _keys(clients: Clients) -> np.ndarray:
    """What the order in every epoch of every client is drawn with."""
    return np.array([rng.philox_key(own.client_id, epoch) for rng, own in clients for epoch in range(own.epochs)])


class BatchSampler:
    """Who takes part in a round, and the minibatches of those who do, for the clients of an environment.

    Args:
        environment: How clients train and how likely they can be reached.
        data: Their data.
        device: Where local training runs.
        dtype: In which precision.
        threads: How many may draw minibatches.
    """

    def __init__(
        self, environment: Environment, data: FederatedData, device: torch.device, dtype: torch.dtype, threads: int = 1
    ) -> None:
        self.batch_size, self.sizes = environment.batch_size, np.array(data.sizes)
        self.max_rows = min(environment.batch_size, max(data.sizes))
        self._data, self._device, self._dtype, self._threads = data, device, dtype, threads
        self.seed, self._cohort_size = environment.seed, environment.clients_per_round
        self._sampler = CLIENT_SAMPLERS.parse(environment.client_sampler)
        self._probabilities = np.array([client.participation_probability for client in environment.clients])
        traced = environment.clock is not None and environment.clock.trace is not None
        self._times = client_times(environment, data) if traced else None
        self._epochs = [client.epochs for client in environment.clients]
        self._starts = np.array(data.offsets[:-1])
        self._ahead: tuple[Clients, BatchPlan] | None = None
        self._uploaded: DeviceBatchPlan | None = None

    @property
    def required_metrics(self) -> frozenset[Metric]:
        """What clients have to report for the sampling of later cohorts."""
        return self._sampler.required_metrics

    def participation(self, rng: RoundRng, reported: Mapping[Metric, Tensor]) -> Participation:
        """Who takes part in a round, given what clients last reported."""
        likely = self._probabilities if self._times is None else self._times.reachable(rng.round)
        return rng.participation(self._data.keys, likely, self.sizes, self._cohort_size, self._sampler, reported)

    def slices(self, t: int) -> ClientSlices:
        """All clients' rows in round t."""
        epochs = np.array([epochs_at(own, t) for own in self._epochs])
        return ClientSlices(self._data.keys, self._starts, self.sizes, epochs)

    def batches(self, clients: Clients) -> DeviceBatchPlan:
        """The minibatches of clients, unless they were drawn ahead."""
        if self._ahead is None or self._ahead[0] != clients:
            return self._plan(clients).upload(self._device, self._dtype)
        self.upload_ahead()
        assert self._uploaded is not None
        return self._uploaded

    def draw_ahead(self, clients: Clients) -> None:
        """Draw minibatches that will be requested next."""
        self._ahead, self._uploaded = (clients, self._plan(clients)), None

    def upload_ahead(self) -> None:
        """Upload what was drawn ahead, where that has not been done; it may wait for what the device is doing."""
        if self._ahead is not None and self._uploaded is None:
            self._uploaded = self._ahead[1].upload(self._device, self._dtype)

    def _plan(self, clients: Clients) -> BatchPlan:
        return plan_batches(clients, self.batch_size, self.max_rows, self._threads)


READ_AT_ONCE = 1024
"""Rows of a data set in memory at a time where all of them are read."""


@dataclass(frozen=True, eq=False)
class MemorySamples:
    """All rows on the device.

    Attributes:
        inputs: The rows.
        y: Their targets.
    """

    inputs: Inputs
    y: Tensor
    _held: dict[str, Inputs] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.y)

    def expect(self, rows: Tensor, counts: np.ndarray) -> None:
        """Nothing has to be read ahead."""

    def minibatches(self, rows: Tensor, counts: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Rows [L, B], of which the first `counts` of each minibatch are real.

        All calls read into the same memory: the rows of one are gone when the next is made.
        """
        flat = rows.flatten()
        buffer = self._buffer(len(flat))
        for held, read in zip(tensors(self.inputs), tensors(buffer), strict=True):
            torch.index_select(held, 0, flat, out=read[: len(flat)])  # several times faster than indexing
        return map_inputs(lambda t: t[: len(flat)].view(*rows.shape, *t.shape[1:]), buffer), self.y[rows]

    def pieces(self, rows: np.ndarray | None, at_once: int) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """Ascending rows, or all, some after the other; a slice, which copies nothing, where none is left out."""
        index: Tensor | slice = slice(None)
        if rows is not None and len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            index = slice(int(rows[0]), int(rows[-1]) + 1)
        elif rows is not None:
            index = torch.from_numpy(rows).to(self.y.device)
        inputs, y = take(self.inputs, index), self.y[index]
        for begin in range(0, len(y), at_once):
            piece = slice(begin, min(begin + at_once, len(y)))
            yield piece, take(inputs, piece), y[piece]

    def _buffer(self, rows: int) -> Inputs:
        held = self._held.get("rows")
        if held is None or len(tensors(held)[0]) < rows:
            held = self._held["rows"] = map_inputs(lambda t: t.new_empty(rows, *t.shape[1:]), self.inputs)
        return held


@dataclass(frozen=True, eq=False)
class DatasetSamples:
    """Rows that are read from data sets when they are needed, ahead of time where the order is known.

    Attributes:
        rows: The data sets.
        device: Where they are computed on.
        dtype: In which precision.
    """

    rows: DatasetRows
    device: torch.device
    dtype: torch.dtype
    _ahead: list[tuple[deque[np.ndarray], Iterator[tuple[Inputs, Tensor]]]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def y(self) -> Tensor:
        """No targets: they come with the rows."""
        return torch.empty(0)

    def expect(self, rows: Tensor, counts: np.ndarray) -> None:
        """The minibatches [S, L, B] will be wanted in this order: workers read them ahead."""
        wanted = [_real(batch, own) for batch, own in zip(rows.cpu().numpy(), counts, strict=True)]
        self._ahead[:] = [(deque(wanted), self.rows.stream(wanted))]

    def minibatches(self, rows: Tensor, counts: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Rows [L, B], of which the first `counts` of each minibatch are real; others are 0."""
        real = _real(rows.cpu().numpy(), counts)
        x, y = self._next(real)
        places = torch.tensor([slot * rows.shape[1] + i for slot, count in enumerate(counts) for i in range(count)])

        def spread(part: Tensor) -> Tensor:
            out = part.new_zeros(rows.numel(), *part.shape[1:])
            out[places] = part
            return out.view(*rows.shape, *part.shape[1:])

        return cast(map_inputs(spread, x), self.device, self.dtype), spread(y).to(self.device)

    def pieces(self, rows: np.ndarray | None, at_once: int) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """Ascending rows, or all, some after the other."""
        rows = np.arange(len(self.rows)) if rows is None else rows
        at_once = min(at_once, READ_AT_ONCE)
        batches = [rows[begin : begin + at_once] for begin in range(0, len(rows), at_once)]
        for i, (x, y) in enumerate(self.rows.stream(batches)):
            piece = slice(i * at_once, i * at_once + len(y))
            yield piece, cast(x, self.device, self.dtype), y.to(self.device)

    def _next(self, real: np.ndarray) -> tuple[Inputs, Tensor]:
        """What was read ahead, where that is what is wanted."""
        if self._ahead:
            wanted, stream = self._ahead[0]
            if wanted and np.array_equal(wanted[0], real):
                wanted.popleft()
                return next(stream)
            self._ahead.clear()
        return self.rows.read(real)


Samples = MemorySamples | DatasetSamples


def samples_of(inputs: "Inputs | DatasetRows", y: Tensor, device: torch.device, dtype: torch.dtype) -> Samples:
    """Rows where they are computed on, in memory one after the other: columns may lie so in a table that was given."""
    if isinstance(inputs, DatasetRows):
        return DatasetSamples(inputs, device, dtype)
    return MemorySamples(cast(inputs, device, dtype), y.to(device).contiguous())


def _real(rows: np.ndarray, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The rows of minibatches [L, B] that are not padding."""
    return np.concatenate([own[:count] for own, count in zip(rows, counts, strict=False)])

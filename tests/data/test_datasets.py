"""Data sets that stay where they are: the same numbers as from memory, without the memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedunfold as fu
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.data.datasets import DatasetRows
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.leave_out import leave_one_out
from fedunfold.rules import dr, size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "batch_size": 4,
    "lr": 0.2,
    "epochs": {"a": 2, "b": 1, "c": 1},
    "participation_probability": 0.7,
}
SIZES = {"a": 9, "b": 5, "c": 13}


def rows(n: int, seed: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    stream = np.random.default_rng(seed)
    return torch.from_numpy(stream.normal(size=(n, 6))).float(), torch.from_numpy(stream.integers(0, classes, n))


PAIRS = {key: rows(n, i) for i, (key, n) in enumerate(SIZES.items())}
TEST = rows(20, 9)


class Counting(Dataset[Any]):
    """Notes which rows are read; reading of `__getitem__` alone."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.read = x, y, list[int]()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.x[index], self.y[index]


class Endless(IterableDataset[Any]):
    """Its rows in their order, with a length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def both(task: Any = None, **reading: Any) -> tuple[fu.Environment, fu.Environment]:
    """The same federation over arrays and over data sets."""
    task = task or fu.classification(3)
    memory = fu.Environment.from_arrays(PAIRS, TEST, task=task, **SETTINGS)
    sets = {key: TensorDataset(*pair) for key, pair in PAIRS.items()}
    return memory, fu.Environment.from_datasets(sets, TensorDataset(*TEST), task=task, **SETTINGS, **reading)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("model", [None, tanh], ids=["stack", "module"])
def test_a_run_is_that_from_memory(model: Any, workers: int) -> None:
    found = []
    for env in both(workers=workers):
        federation = SimulatedFederation(env, model=model, dtype=torch.float64)
        found.append(run_rounds(federation, dr(), 3, algorithm=Algorithm(fu.sgd())))
    (memory,), (read,) = found
    torch.testing.assert_close(read.model, memory.model, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(read.weights, memory.weights, rtol=1e-10, atol=1e-12)
    assert [test.metrics for test in read.evaluations] == [test.metrics for test in memory.evaluations]


@pytest.mark.parametrize("outer", ["path", "balanced", "final"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_gradients_are_those_from_memory(adjoint: AdjointKind, outer: str) -> None:
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.5
    found = []
    for env in both():
        federation = SimulatedFederation(env, model=tanh, dtype=torch.float64)
        parts = Algorithm(fu.sgd()), OUTER_LOSSES.make(outer), adjoint
        start = federation.initial_model("learn-0")
        found += unroll_and_grad(federation, theta, *parts, runs=["learn-0"], models=[start])
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-12)
    torch.testing.assert_close(found[1].gradient, found[0].gradient, rtol=1e-9, atol=1e-12)


def test_only_what_a_round_trains_on_is_read() -> None:
    sets = {key: Counting(*pair) for key, pair in PAIRS.items()}
    env = fu.Environment.from_datasets(
        sets, Counting(*TEST), task=fu.classification(3), rounds=1, batch_size=4, lr=0.1, clients_per_round=1
    )
    federation = SimulatedFederation(env)
    for found in sets.values():
        found.read.clear()
    run_rounds(federation, size(), 1)
    read = {key: sorted(found.read) for key, found in sets.items() if found.read}
    assert len(read) == 1
    ((key, numbers),) = read.items()
    assert numbers == list(range(SIZES[key]))


def test_label_counts_are_read_from_targets_where_there_are_any() -> None:
    memory, read = both()
    assert torch.equal(read.load().label_counts, memory.load().label_counts)
    assert read.load().known_label_counts.shape == (3, 0)
    found = TensorDataset(*PAIRS["a"])
    found.targets = PAIRS["a"][1].tolist()  # type: ignore[attr-defined]  # as torchvision's have them
    env = fu.Environment.from_datasets({"a": found}, found, task=fu.classification(3), rounds=1, batch_size=2, lr=0.1)
    assert env.load().known_label_counts.tolist() == memory.load().label_counts[:1].tolist()


def test_a_hub_data_set_fits_as_it_is() -> None:
    """Rows are dicts: the target by its name, the rest are inputs by name."""
    x, y = PAIRS["c"]
    hub = (
        pytest.importorskip("datasets")
        .Dataset.from_dict({"pixels": x.tolist(), "label": y.tolist()})
        .with_format("torch")
    )
    env = fu.Environment.from_datasets(
        {"a": hub}, hub, task=fu.classification(3), target="label", rounds=2, batch_size=4, lr=0.2
    )
    arrays = fu.Environment.from_arrays({"a": (x, y)}, (x, y), classes=3, rounds=2, batch_size=4, lr=0.2)
    (found,), (expected,) = (run_rounds(SimulatedFederation(e), size(), 2) for e in (env, arrays))
    torch.testing.assert_close(found.model, expected.model, rtol=1e-5, atol=1e-6)


def test_inputs_by_name_and_a_collate_function() -> None:
    """Sequences of different lengths, padded in the minibatch."""
    stream = np.random.default_rng(0)
    samples = [(torch.from_numpy(stream.integers(1, 9, n)), int(n % 2)) for n in (3, 5, 2, 4, 5, 3)]

    def collate(items: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
        ids = nn.functional.pad(ids, (0, 6 - ids.shape[1]))
        return {"ids": ids, "mask": ids > 0}, torch.tensor([label for _, label in items])

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.out((self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
            return out

    listed: Any = samples
    env = fu.Environment.from_datasets(
        {"a": listed, "b": listed}, listed, task=fu.binary(), collate=collate, rounds=2, batch_size=4, lr=0.5
    )
    (found,) = run_rounds(SimulatedFederation(env, model=Bag), size(), 2)
    assert found.evaluations[1].loss < found.evaluations[0].loss
    assert set(found.evaluations[1].metrics) == {"accuracy", "balanced_accuracy", "auc", "f1", "brier"}


def test_an_iterable_data_set_goes_with_first_order_only() -> None:
    sets = {key: Endless(*pair) for key, pair in PAIRS.items()}
    env = fu.Environment.from_datasets(sets, TensorDataset(*TEST), task=fu.classification(3), **SETTINGS)
    federation = SimulatedFederation(env, model=tanh, dtype=torch.float64)
    theta, start = torch.ones(3, 3, dtype=torch.float64), federation.initial_model("learn-0")
    parts = Algorithm(fu.sgd()), OUTER_LOSSES.make("path")
    (found,) = unroll_and_grad(federation, theta, *parts, "first_order", runs=["learn-0"], models=[start])
    assert found.gradient.isfinite().all()
    with pytest.raises(InputError, match=r"IterableDataset gives other samples each time.*first_order"):
        unroll_and_grad(federation, theta, *parts, "exact", runs=["learn-0"], models=[start])


def test_rows_are_held_out_and_clients_left_out_as_from_memory() -> None:
    memory, read = both()
    expected, found = (leave_one_out(env, ["fedavg"], trials=1).scores["fedavg"] for env in (memory, read))
    assert found == pytest.approx(expected)
    expected, found = (dict(fu.run(env.replace(holdout=0.3)).held_out) for env in (memory, read))
    assert found == pytest.approx(expected)
    parts = [env.load().held_out(0.2, 0).restricted(0.5, 1) for env in (memory, read)]
    assert parts[0].sizes == parts[1].sizes == (4, 2, 6)
    federations = [SimulatedFederation(memory, part) for part in parts]
    losses = [found.evaluate([found.initial_model("trial-0")])[0].loss for found in federations]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    one = TensorDataset(*PAIRS["a"])
    one.targets = PAIRS["a"][1]  # type: ignore[attr-defined]
    known = DatasetRows({"client a": one}, fu.classification(3)).take(np.array([1, 4])).targets(0)
    assert known is not None and torch.equal(known, PAIRS["a"][1][[1, 4]])
    endless = DatasetRows({"client a": Endless(*PAIRS["a"])}, fu.classification(3))
    with pytest.raises(InputError, match="IterableDataset cannot be divided"):
        endless.take(np.array([0]))


@pytest.mark.parametrize(
    ("task", "y", "module"),
    [
        (fu.segmentation(2), torch.zeros(8, 3, 3).long(), lambda: nn.Conv2d(1, 2, 3, padding=1)),
        (fu.next_token(4), torch.full((8, 3), -100), lambda: nn.Embedding(4, 4)),
    ],
)
def test_a_minibatch_may_show_only_background_or_padding(task: Any, y: Tensor, module: Any) -> None:
    y[0] = 1
    x = torch.zeros_like(y) if task.keeps_integers else torch.ones(8, 1, 3, 3)
    rows = TensorDataset(x, y)
    env = fu.Environment.from_datasets({"a": rows}, rows, task=task, rounds=2, batch_size=1, lr=0.1)
    arrays = fu.Environment.from_arrays({"a": (x, y)}, (x, y), task=task, rounds=2, batch_size=1, lr=0.1)
    found, expected = (fu.run(chosen, fu.size(), model=module) for chosen in (env, arrays))
    torch.testing.assert_close(found.model, expected.model)


def test_the_digest_tells_data_sets_apart() -> None:
    _, read = both()
    other = {key: TensorDataset(x + 1, y) for key, (x, y) in PAIRS.items()}
    moved = fu.Environment.from_datasets(other, TensorDataset(*TEST), task=fu.classification(3), **SETTINGS)
    assert read.digest(read.load()) == both()[1].digest(both()[1].load())
    assert read.digest(read.load()) != moved.digest(moved.load())


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize(
    ("dataset", "more", "message"),
    [
        (Unsized(), {}, "the data set of client a has no length"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), {}, "the data set of client a is empty"),
        (3, {}, "client a is no data set"),
        (TensorDataset(torch.zeros(4, 2)), {}, r"a sample of client a is not a pair \(x, y\)"),
        (TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 5, 0])), {}, "y of client a has the label 5"),
        (
            TensorDataset(torch.full((4, 6), torch.nan), torch.zeros(4).long()),
            {},
            "x of client a has a NaN or infinite",
        ),
        (TensorDataset(*PAIRS["a"]), {"target": "label"}, "the samples of client a are no dicts with 'label'"),
    ],
)
def test_what_cannot_be_used(dataset: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        env = fu.Environment.from_datasets(
            {"a": dataset}, TensorDataset(*TEST), task=fu.classification(3), rounds=1, batch_size=4, lr=0.1, **more
        )
        run_rounds(SimulatedFederation(env), size(), 1)


LARGE = """
import multiprocessing, pathlib, torch
import fedunfold as fu

class Rows(torch.utils.data.Dataset):
    '''20 GB: rows of 40 kB that are made when they are read.'''
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        x = torch.empty(10_000).fill_((i %% 7) / 7)
        return x, torch.tensor([float(i %% 7)])

env = fu.Environment.from_datasets({"a": Rows(%d)}, Rows(64), task=fu.regression(), rounds=1, batch_size=256, lr=1e-6,
                                   workers=2)
fu.run(env, fu.size())

def peak(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

workers = multiprocessing.active_children()
print(len(workers), sum(peak(pid) for pid in ("self", *(worker.pid for worker in workers))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_rows_beyond_memory_are_read_and_gone(tmp_path: Path) -> None:
    """A tenth of 20 GB here, which does not matter for the memory: no row is held after its minibatch."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE % 50_000], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=600
    )
    workers, peak = map(int, done.stdout.split()[-2:])
    assert workers >= 2
    assert peak < 1.5 * 2**30

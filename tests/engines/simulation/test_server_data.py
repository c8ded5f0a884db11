"""The loss of rows of the server and its gradient, against autograd through the module itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.params import ParamLayout
from fedunfold.core.server_data import ServerData
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.backends.cpu.local_training import is_supported
from fedunfold.tasks import classification, regression, survival
from tests.support.federations import simulated, tiny

DRAWN = np.random.default_rng(4)
X = DRAWN.normal(size=(9, 5)).astype(np.float32)
LABELS, NUMBERS = DRAWN.integers(0, 3, 9), DRAWN.normal(size=(9, 1)).astype(np.float32)
TIMES = np.stack([1 + np.arange(9) % 4, np.arange(9) % 3 != 2], 1).astype(np.float32)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def environment(y: Any, **settings: Any) -> Environment:
    clients = {"a": (X[:6] + 1, y[:6]), "b": (X[:4] - 1, y[:4])}
    return Environment.from_arrays(clients, (X, y), server_data=(X, y), rounds=1, batch_size=2, lr=0.1, **settings)


def rows_of(federation: SimulatedFederation) -> ServerData:
    found = federation.server_data(Algorithm().request("a", 0, federation.initial_model("a")))
    assert found is not None
    return found


CASES: dict[str, tuple[Any, Any, Callable[[], nn.Module] | None]] = {
    "stack": (LABELS, classification(3), None),
    "module": (LABELS, classification(3), lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))),
    "normalised": (LABELS, classification(3), normalised),
    "regression": (NUMBERS, regression(), lambda: nn.Linear(5, 1)),
    "survival": (TIMES, survival(), lambda: nn.Linear(5, 1)),
}


@pytest.mark.parametrize("rows", [[4, 0, 7], list(range(9))], ids=["some", "all"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_modules(name: str, rows: list[int]) -> None:
    y, task, model = CASES[name]
    env = environment(y, task=task, model=(4,))
    federation = SimulatedFederation(env, model=model, dtype=torch.float64)
    w = federation.initial_model("a")
    module = federation.module(w).double()
    x, targets = torch.from_numpy(X[rows]).double(), torch.from_numpy(task.check_targets(y[rows], "y"))
    targets = targets.double() if targets.is_floating_point() else targets
    loss = task.losses(module(x), targets).mean()
    trained = [p for p in module.parameters() if p.requires_grad]
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained)])
    found, slope = rows_of(federation).loss_and_gradient(w, np.array(rows, dtype=np.int32))
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-12)
    layout: ParamLayout = federation.layout
    torch.testing.assert_close(layout.params(slope), gradient, rtol=1e-10, atol=1e-12)
    assert layout.buffers(slope).tolist() == [0.0] * layout.num_buffer_entries
    assert float(gradient.norm()) > 1e-3


def test_compiled_code_gives_the_same() -> None:
    """In single precision, as it computes."""
    env = environment(LABELS, model=(4,))
    single, double = (SimulatedFederation(env, dtype=dtype) for dtype in (torch.float32, torch.float64))
    w = double.initial_model("a")
    rows = np.array([8, 1, 3], dtype=np.int32)
    ours, theirs = (
        rows_of(f).loss_and_gradient(w.to(t), rows) for f, t in ((single, w.float().dtype), (double, w.dtype))
    )
    assert single._backend.cpu is not None or not is_supported(torch.from_numpy(X))
    torch.testing.assert_close(ours[1].double(), theirs[1], rtol=1e-4, atol=1e-6)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-5)


def test_data_sets() -> None:
    def dataset(x: np.ndarray, y: np.ndarray) -> TensorDataset:
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    own = dataset(X, LABELS)
    settings: dict[str, Any] = {"task": classification(3), "rounds": 1, "batch_size": 2, "lr": 0.1, "model": (4,)}
    env = Environment.from_datasets({"a": dataset(X[:6], LABELS[:6])}, own, server_data=own, **settings)
    arrays = Environment.from_arrays({"a": (X[:6], LABELS[:6])}, (X, LABELS), server_data=(X, LABELS), **settings)
    rows = np.array([2, 5], dtype=np.int32)
    found = []
    for given in (env, arrays):
        federation = simulated(given)
        found.append(rows_of(federation).loss_and_gradient(federation.initial_model("a"), rows))
    torch.testing.assert_close(found[0][1], found[1][1])
    assert len(rows_of(simulated(env))) == 9


def test_a_server_without_data_has_none() -> None:
    federation = simulated(tiny())
    assert federation.server_data(Algorithm().request("a", 0, federation.initial_model("a"))) is None
    data = federation.data
    with_rows = SimulatedFederation(federation.environment, replace(data, server=data.client(0)), dtype=torch.float64)
    assert len(rows_of(with_rows)) == data.sizes[0]


def test_the_model_that_is_asked_about_stays_as_it_is() -> None:
    federation = simulated(environment(LABELS, model=(4,)))
    w = federation.initial_model("a")
    before: Tensor = w.clone()
    rows_of(federation).loss_and_gradient(w, np.arange(9, dtype=np.int32))
    assert torch.equal(w, before)

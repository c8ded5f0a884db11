"""Clients with files of their own, for every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.engines.flower import FederationConfig, client_app, client_from_npz, federation_from_config
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.tasks import regression
from fedunfold.training.loop import run_rounds
from tests.support.grid import LocalGrid
from tests.unfolding.test_task_gradients import CASES, inputs_of, perceptron, targets_of

KEYS = ("a", "b", "c")


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.parametrize("name", ["mse", "efron", "attention", "custom"])
def test_files_give_the_engines_numbers(tmp_path: Path, name: str, tested: bool) -> None:
    chosen, targets, inputs, build, _ = CASES[name]
    stream = np.random.default_rng(1)
    rows = {key: (inputs_of(inputs, 6, stream), targets_of(targets, 6, stream)) for key in (*KEYS, "test")}
    for key, (x, y) in rows.items():
        np.savez(tmp_path / f"{key}.npz", **(x if isinstance(x, dict) else {"x": x}), y=y)
    test = rows.pop("test")
    settings: dict[str, Any] = {"task": chosen, "rounds": 2, "batch_size": 3, "lr": 0.1}
    settings |= {"clients_per_round": 2, "client_sampler": "round-robin"}
    env = Environment.from_arrays(rows, test, **settings)
    config = FederationConfig(client_ids=KEYS, **settings)
    app = client_app(
        lambda context: client_from_npz(
            tmp_path / f"{context.node_config['client-id']}.npz",
            str(context.node_config["client-id"]),
            config,
            torch.float64,
            model=build,
        )
    )
    grid = LocalGrid(app, {k: {"client-id": key} for k, key in enumerate(KEYS)})
    file = tmp_path / "test.npz" if tested else None
    there = run_rounds(federation_from_config(grid, config, file, model=build, dtype=torch.float64), size(), 2)[0]
    here = run_rounds(SimulatedFederation(env, model=build, dtype=torch.float64), size(), 2)[0]
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)
    assert set(there.evaluations[-1].metrics) == set(here.evaluations[-1].metrics)
    if tested:
        assert there.evaluations[-1].loss == pytest.approx(here.evaluations[-1].loss, rel=1e-9)


def test_a_file_without_inputs(tmp_path: Path) -> None:
    config = FederationConfig(client_ids=("a",), task=regression(), rounds=1, batch_size=2, lr=0.1)
    np.savez(tmp_path / "a.npz", y=np.arange(3.0))
    with pytest.raises(InputError, match=r"client a: .*a\.npz has no x, only y"):
        client_from_npz(tmp_path / "a.npz", "a", config)
    np.savez(tmp_path / "a.npz", ids=np.zeros((3, 2)), more=np.zeros(3), y=np.arange(3.0))
    with pytest.raises(InputError, match="client a: The inputs ids, more need a model of your own"):
        client_from_npz(tmp_path / "a.npz", "a", config)
    np.savez(tmp_path / "a.npz", ids=np.zeros((3, 2)), more=np.zeros(4), y=np.arange(3.0))
    with pytest.raises(InputError, match=r"a\.npz has inputs of different lengths"):
        client_from_npz(tmp_path / "a.npz", "a", config, model=perceptron(1))


def test_a_test_file_of_other_rows(tmp_path: Path) -> None:
    config = FederationConfig(client_ids=("a",), task=regression(), rounds=1, batch_size=2, lr=0.1)
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.arange(3.0))
    np.savez(tmp_path / "test.npz", x=np.zeros((3, 4)), y=np.arange(3.0))
    grid = LocalGrid(client_app(lambda context: client_from_npz(tmp_path / "a.npz", "a", config)), {1: {}})
    with pytest.raises(InputError, match=r"test\.npz has rows of shape \[4\], the clients have \[2\]; make them alike"):
        federation_from_config(grid, config, tmp_path / "test.npz")


def test_a_sampler_nobody_has() -> None:
    with pytest.raises(InputError, match="field client_sampler: unknown client sampler 'by-sise'; did you mean"):
        FederationConfig(client_ids=("a",), task=regression(), rounds=1, batch_size=2, lr=0.1, client_sampler="by-sise")


def test_a_task_by_its_name() -> None:
    def task_of(given: Any) -> Any:
        return FederationConfig(client_ids=("a",), task=given, rounds=1, batch_size=2, lr=0.1).task

    assert task_of("regression") == regression()
    assert task_of({"name": "regression", "outputs": 2}) == regression(outputs=2)
    with pytest.raises(InputError, match="unknown task 'regresion'; did you mean 'regression'"):
        task_of("regresion")
    with pytest.raises(InputError, match="more than the 100000 classes"):
        task_of({"name": "classification", "classes": 10**6})

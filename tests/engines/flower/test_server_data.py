"""A server with data of its own, over Flower: the numbers of the simulation, or a sentence that says why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.parts import RoundDecision
from fedunfold.engines.flower import FederationConfig, WeightedStrategy, client_app, client_from_npz
from fedunfold.engines.flower.federations import client_from_environment, federation_from_config
from fedunfold.engines.flower.federations import federation_from_environment as from_environment
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.rules import fedlaw
from fedunfold.rules.step import step
from fedunfold.tasks import classification
from fedunfold.training.loop import run_rounds
from tests.engines.flower.test_server import InProcess
from tests.engines.flower.test_strategy import NODES, app_of, start, trained
from tests.support.federations import mlp, simulated
from tests.support.grid import LocalGrid
from tests.training.test_server_data import LAW, with_server


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("sampled", [None, 2])
def test_runs(absent: Absent, sampled: int | None) -> None:
    """Messages straight to the clients, with absent and sampled ones."""
    env = with_server(participation_probability=0.6, seed=3).replace(clients_per_round=sampled)
    here = simulated(env)
    there = RemoteFederation(
        InProcess(env), env, mlp(env), here.evaluate, dtype=torch.float64, server_data=here.server_data
    )
    ours, theirs = (run_rounds(f, LAW, 3, algorithm=Algorithm(absent=absent))[0] for f in (here, there))
    assert not ours.participated.all()
    torch.testing.assert_close(theirs.weights, ours.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theirs.model, ours.model, rtol=1e-9, atol=1e-12)
    assert theirs.scores == ours.scores


@pytest.mark.parametrize("secure", [False, True])
def test_an_environment_behind_a_grid(secure: bool) -> None:
    """By `server_rows`, which neither side sends; where the server sees sums of updates only, it is refused."""
    env = fu.environment("digits-label-skew").replace(server_rows=60, rounds=2)
    app = client_app(lambda context: client_from_environment(env, context, torch.float64))
    grid = LocalGrid(app, {k: {"partition-id": k} for k in range(5)})
    there = from_environment(grid, env, dtype=torch.float64, secure_aggregation=secure)
    if secure:
        with pytest.raises(InputError, match="secure aggregation reveals no update of a single client"):
            run_rounds(there, fedlaw(epochs=2), 2)
        return
    ours, theirs = (run_rounds(f, fedlaw(epochs=2), 2)[0] for f in (simulated(env), there))
    torch.testing.assert_close(theirs.weights, ours.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theirs.model, ours.model, rtol=1e-9, atol=1e-12)


def test_without_data_it_is_refused() -> None:
    env = fu.environment("digits-label-skew").replace(rounds=1)
    app = client_app(lambda context: client_from_environment(env, context))
    there = from_environment(LocalGrid(app, {k: {"partition-id": k} for k in range(5)}), env)
    with pytest.raises(InputError, match="rule 'fedlaw' reads data of the server"):
        run_rounds(there, fedlaw(), 1)


@pytest.mark.parametrize("tested", [True, False])
def test_a_file_beside_the_server(tmp_path: Path, tested: bool) -> None:
    stream = np.random.default_rng(1)
    rows = {key: (stream.normal(size=(7, 4)).astype(np.float32), np.arange(7) % 3) for key in ("a", "b", "test", "own")}
    for key, (x, y) in rows.items():
        np.savez(tmp_path / f"{key}.npz", x=x, y=y)
    test, own = rows.pop("test"), rows.pop("own")
    settings: dict[str, Any] = {"task": classification(3), "rounds": 2, "batch_size": 3, "lr": 0.1}
    config = FederationConfig(client_ids=("a", "b"), **settings)

    def client(context: Any) -> Any:
        key = str(context.node_config["client-id"])
        return client_from_npz(tmp_path / f"{key}.npz", key, config, torch.float64)

    grid = LocalGrid(client_app(client), {1: {"client-id": "a"}, 2: {"client-id": "b"}})
    file = tmp_path / "test.npz" if tested else None
    there = federation_from_config(grid, config, file, server_data=tmp_path / "own.npz", dtype=torch.float64)
    here = simulated(Environment.from_arrays(rows, test, server_data=own, **settings))
    ours, theirs = (run_rounds(f, LAW, 2)[0] for f in (here, there))
    torch.testing.assert_close(theirs.weights, ours.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theirs.model, ours.model, rtol=1e-9, atol=1e-12)
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 2)), y=np.arange(3))
    with pytest.raises(InputError, match=r"own\.npz has rows of shape \[2\], the clients have \[4\]"):
        federation_from_config(grid, config, server_data=tmp_path / "own.npz")


# --- servers that know less --------------------------------------------------------------------------------


@fu.rule()
def halving(updates: Any, state: Any) -> Any:
    """Equal weights, and half of the model."""
    return RoundDecision(torch.full((len(updates.client_ids),), 1 / 3), scale=0.5), state


def test_a_strategy_scales_the_model_by_hand() -> None:
    """Clients move from w halfway to 1, 2 and 4, on average by (7/3 − w)/2: 7/12 after one round, and after two half of
    (7/12 + 7/3)/2. A counter is not scaled."""
    assert trained(start(WeightedStrategy(halving), LocalGrid(app_of(), NODES))) == pytest.approx((7 / 12 + 7 / 3) / 4)
    result = start(WeightedStrategy(halving), LocalGrid(app_of(), NODES), rounds=1)
    assert trained(result) == pytest.approx(7 / 12)
    assert result.arrays["count"].numpy().tolist() == pytest.approx([7])


def test_a_strategy_has_no_data_of_its_own() -> None:
    with pytest.raises(
        InputError, match="rule 'fedlaw' reads data of the server, of which a WeightedStrategy has none"
    ):
        start(WeightedStrategy(fedlaw()), LocalGrid(app_of(), NODES))
    assert not issubclass(InputError, FederationError)


def test_a_round_in_numpy_is_not_told_the_model() -> None:
    with pytest.raises(InputError, match="round 0: rule 'halving' scales the model, which step is not told"):
        step(halving, np.ones((3, 2)), [1, 1, 1])
    with pytest.raises(InputError, match="rule 'fedlaw' reads data of the server"):
        step(fedlaw(), np.ones((3, 2)), [1, 1, 1])

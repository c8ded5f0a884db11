"""Rows of the server: no client's, none of the test set."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from fedunfold.config import Environment, environment
from fedunfold.core.errors import InputError
from fedunfold.data import FederatedData
from fedunfold.data.datasets import DatasetRows
from fedunfold.leave_out import without_client
from fedunfold.tasks import classification

TRAINING: dict[str, Any] = {"rounds": 1, "batch_size": 2, "lr": 0.1}


def numbered(*sizes: int) -> FederatedData:
    """Clients whose rows are the numbers 0, 1, … and a test set of rows below 0."""
    starts = np.cumsum((0, *sizes))
    rows = [np.arange(start, end, dtype=np.float32)[:, None] for start, end in pairwise(starts)]
    clients = {f"c{k}": (x, (x[:, 0] % 3).astype(int)) for k, x in enumerate(rows)}
    return FederatedData.from_clients(clients, (np.array([[-1.0], [-2.0]]), np.array([0, 2])))


def held(data: FederatedData) -> tuple[list[int], Tensor]:
    """The numbers of the server's rows, and their targets."""
    assert data.server is not None and isinstance(data.server[0], Tensor)
    return data.server[0][:, 0].int().tolist(), data.server[1]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 40))
def test_a_row_is_a_clients_or_the_servers(sizes: list[int], count: int) -> None:
    """Every client keeps at least one of its own, in their order; targets go with their rows."""
    whole = numbered(*sizes)
    count = 1 + count % max(1, sum(sizes) - len(sizes))
    if sum(sizes) == len(sizes):
        with pytest.raises(InputError, match="the clients have 0 rows to give"):
            whole.with_server_rows(count)
        return
    data = whole.with_server_rows(count)
    own, y = held(data)
    assert len(own) == count and y.tolist() == [row % 3 for row in own]
    left = data.x[:, 0].int().tolist()
    assert sorted(own + left) == list(range(sum(sizes)))
    assert left == sorted(left) and data.y.tolist() == [row % 3 for row in left]
    assert min(data.sizes) >= 1 and data.keys == whole.keys
    for k in range(len(sizes)):
        assert set(data.client(k)[0].flatten().tolist()) <= set(whole.client(k)[0].flatten().tolist())
    assert torch.equal(data.x_test, whole.x_test) and torch.equal(data.y_test, whole.y_test)
    assert held(whole.with_server_rows(count))[0] == own


def test_all_clients_give() -> None:
    """In proportion to what they have, up to chance."""
    given_up = [n - left for n, left in zip((300, 600), numbered(300, 600).with_server_rows(300).sizes, strict=True)]
    assert given_up == pytest.approx([100, 200], abs=25)


def test_what_cannot_be_given_is_refused() -> None:
    with pytest.raises(InputError, match="field server_rows: the clients have 8 rows to give; take that many or fewer"):
        numbered(5, 5).with_server_rows(9)
    with pytest.raises(InputError, match="field server_rows: the server has data already"):
        numbered(5, 5).with_server_rows(2).with_server_rows(2)


def test_what_becomes_of_the_clients_leaves_the_servers_alone() -> None:
    data = numbered(9, 12).with_server_rows(4)
    for other in (data.restricted(0.5, 0), data.held_out(0.3, 0), *data.split(0.3), data.without("c0")):
        assert held(other)[0] == held(data)[0]
        assert not set(held(data)[0]) & set(other.x[:, 0].int().tolist() + other.x_test[:, 0].int().tolist())


def test_they_are_part_of_what_the_data_are() -> None:
    plain, some, more = numbered(9, 12), numbered(9, 12).with_server_rows(4), numbered(9, 12).with_server_rows(5)
    assert len({data.checksum for data in (plain, some, more)}) == 3
    assert some.checksum == numbered(9, 12).with_server_rows(4).checksum


# --- environments ------------------------------------------------------------------------------------------


def test_an_environment_with_server_rows() -> None:
    plain = environment("digits-label-skew")
    env = plain.replace(server_rows=150)
    data = env.load()
    assert data.server is not None and len(data.server[1]) == 150
    assert sum(data.sizes) == sum(plain.load().sizes) - 150
    everybody = torch.cat([data.x, data.server[0]])  # type: ignore[list-item]
    assert torch.equal(everybody.sum(0), plain.load().x.sum(0)), "sixteenths add up exactly"
    assert env.replace(server_rows=None).load().server is None, "what was loaded is not taken over"
    assert env.replace(rounds=2).load() is data
    assert Environment(**{**env.model_dump(), "seed": 7}).load().checksum == data.checksum
    assert Environment.parse(env.to_toml(), env._folder / "copy.toml") == env
    assert "server_rows = 150" in env.to_toml()
    with pytest.raises(InputError, match="server_rows"):
        plain.replace(server_rows=0)


def test_what_clients_hold_out_is_of_the_rest() -> None:
    env = environment("digits-label-skew").replace(server_rows=100, holdout=0.2)
    kept, out = env.load(), env.load_held_out()
    assert out is not None and kept.server is not None
    assert sum(kept.sizes) + sum(out.sizes) + 100 == sum(environment("digits-label-skew").load().sizes)


def test_a_client_that_is_left_out_gives_nothing() -> None:
    env = environment("digits-label-skew").replace(server_rows=100)
    rest = without_client(env, "site-b").load()
    own = environment("digits-label-skew").load().client(1)
    assert torch.equal(rest.x_test, own[0]), "it is tested on all of its rows"
    assert rest.server is not None and len(rest.server[1]) == 100
    assert not set(rest.server[1].tolist()) & {0, 4, 6}, "the labels that it alone has"


def pair(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2


def test_arrays_of_the_server() -> None:
    clients = {"a": pair(6, 0), "b": pair(4, 1)}
    env = Environment.from_arrays(clients, pair(5, 2), server_data=pair(7, 3), **TRAINING)
    plain = Environment.from_arrays(clients, pair(5, 2), **TRAINING)
    data = env.load()
    assert data.server is not None
    np.testing.assert_array_equal(data.server[0], pair(7, 3)[0])
    np.testing.assert_array_equal(data.server[1], pair(7, 3)[1])
    assert torch.equal(data.x, plain.load().x) and torch.equal(data.x_test, plain.load().x_test)
    digests = {given.digest(given.load()) for given in (env, plain, plain.replace(server_rows=3))}
    assert len(digests) == 3
    with pytest.raises(InputError, match="field server_rows: the server has data already"):
        env.replace(server_rows=2).load()


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ((np.zeros((3, 2)), np.zeros(3, dtype=int)), "x of the server has rows of shape"),
        ((np.zeros((3, 3)), np.zeros(2, dtype=int)), "y of the server has shape"),
        ((np.full((3, 3), np.nan), np.zeros(3, dtype=int)), "x of the server has a NaN"),
        ((np.zeros((3, 3)),), "the server has 1 arrays"),
        ((np.zeros((3, 3)), np.array([0, 1, 9])), "y of the server"),
    ],
)
def test_bad_arrays_of_the_server_are_named(server: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        Environment.from_arrays({"a": pair(6, 0)}, pair(5, 2), server_data=server, classes=2, **TRAINING)


def test_a_data_set_of_the_server() -> None:
    def dataset(n: int, seed: int) -> TensorDataset:
        x, y = pair(n, seed)
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    clients = {"a": dataset(6, 0), "b": dataset(4, 1)}
    settings = {"task": classification(2), **TRAINING}
    plain = Environment.from_datasets(clients, dataset(5, 2), **settings)
    env = Environment.from_datasets(clients, dataset(5, 2), server_data=dataset(7, 3), **settings)
    other = Environment.from_datasets(clients, dataset(5, 2), server_data=dataset(7, 4), **settings)
    found = env.load().server
    assert found is not None and isinstance(found[0], DatasetRows)
    np.testing.assert_array_equal(found[0].read(np.arange(7))[0], pair(7, 3)[0])
    assert len({given.digest(given.load()) for given in (plain, env, other)}) == 3
    drawn = plain.replace(server_rows=3).load()
    assert drawn.server is not None and isinstance(drawn.server[0], DatasetRows)
    assert len(drawn.server[0]) == 3 and sum(drawn.sizes) == 7

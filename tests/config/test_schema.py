"""Environments: bundled ones load, files go round, wrong ones are explained in one line."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import Client, Environment, ModelSpec, bundled, environment
from fedunfold.core.errors import InputError

DIGITS = [name for name in bundled() if name.startswith("digits-")]


def pair(rows: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 3)), np.arange(rows) % 2


def in_memory(**options: Any) -> Environment:
    settings = {"rounds": 3, "batch_size": 4, "lr": 0.1} | options
    return Environment.from_arrays({"a": pair(6), "b": pair(8, 1)}, pair(4, 2), **settings)


def test_the_bundled_ones_are_listed() -> None:
    assert set(bundled()) >= {
        "digits-label-skew",
        "digits-quantity-skew",
        "digits-compute-skew",
        "digits-flaky",
        "mnist-2",
    }


@pytest.mark.parametrize("name", DIGITS)
def test_bundled_digits_load_and_name_themselves(name: str) -> None:
    env = environment(name)
    data = env.load()
    assert env.name == name and env.description
    assert data.keys == tuple(f"site-{letter}" for letter in "abcde")
    assert data.classes == 10 and len(data.y_test) == 500
    assert env.load() is data


def test_label_skew_holds_the_papers_labels() -> None:
    counts = environment("digits-label-skew").load().label_counts
    held = [set(row.nonzero().flatten().tolist()) for row in counts]
    assert held == [{2, 9}, {0, 4, 6}] + [{1, 3, 5, 7, 8}] * 3


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDUNFOLD_DATA") or "no-data-folder") / "mnist.npz").exists(),
    reason="needs mnist.npz in the folder that FEDUNFOLD_DATA names",
)
def test_mnist_label_skew_has_the_papers_sizes() -> None:
    data = environment("mnist-2").load()
    assert data.sizes == (6775, 6774, 6776, 6776, 6776)
    assert data.label_counts[0].tolist() == [0, 0, 3388, 0, 0, 0, 0, 0, 0, 3387]
    assert len(data.y_test) == 10000


@pytest.mark.parametrize("name", bundled())
def test_toml_round_trip(name: str, tmp_path: Path) -> None:
    env = environment(name)
    path = tmp_path / "copy.toml"
    path.write_text(env.to_toml())
    assert environment(path).model_dump() == environment(str(path)).model_dump() == env.model_dump()


def test_count_expands_to_numbered_clients_and_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "many.toml"
    path.write_text("""
name = "many"
rounds = 2
batch_size = 10
lr = 0.1
clients_per_round = 20
data.source = "digits"
partition = {kind = "dirichlet", alpha = 0.0005, seed = 3}
[[clients]]
key = "first"
epochs = [1, 3]
[[clients]]
key = "phone"
count = 999
participation_probability = 0.5
""")
    env = Environment.from_toml(path)
    assert [client.key for client in env.clients[:3]] == ["first", "phone-0", "phone-1"]
    assert env.clients[-1] == Client(key="phone-998", participation_probability=0.5)
    assert [env.epochs(0, t) for t in range(3)] == [1, 3, 3]
    assert env.epochs(1, 7) == 1
    data = env.load()
    assert len(data.keys) == 1000 and min(data.sizes) >= 1 and sum(data.sizes) == 1297
    path.write_text(env.to_toml())
    assert Environment.from_toml(path) == env


def test_seed_moves_no_data_but_the_partitions_seed_does() -> None:
    env = environment("digits-quantity-skew")
    fresh = Environment(**env.model_dump() | {"seed": 7})
    assert torch.equal(env.load().x, fresh.load().x)
    moved = env.replace(partition=env.partition.model_copy(update={"seed": 1}))
    assert moved.load().sizes == env.load().sizes
    assert not torch.equal(env.load().x, moved.load().x)


def test_with_checks_and_keeps_the_rest() -> None:
    env = environment("digits-flaky")
    data = env.load()
    changed = env.replace(rounds=3, lr=0.2)
    assert (changed.rounds, changed.lr, changed.clients) == (3, 0.2, env.clients)
    assert changed.load() is data
    assert env.rounds == 10


def test_digest_depends_on_the_federation_only() -> None:
    env = environment("digits-flaky")
    data = env.load()
    digest = env.digest(data)
    assert len(digest) == 64 and int(digest, 16) >= 0
    same = env.replace(seed=9, rounds=2, name="other", description="else")
    assert same.digest(data) == digest
    first = env.clients[0].model_copy(update={"epochs": 3})
    others: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"batch_size": 5},
        {"clients_per_round": 2},
        {"model": ModelSpec()},
        {"clients": (first, *env.clients[1:])},
    ]
    assert len({env.replace(**change).digest(data) for change in others} | {digest}) == 6
    assert env.digest(data.restricted(0.5, 0)) != digest


def test_data_in_memory() -> None:
    env = in_memory(epochs={"a": 2, "b": (1, 2, 3)}, participation_probability=0.5, model=(8,), clients_per_round=1)
    assert env.load().sizes == (6, 8)
    assert [env.epochs(k, 1) for k in range(2)] == [2, 2]
    assert env.clients[1].participation_probability == 0.5 and env.model.hidden == (8,)
    assert env.replace(seed=4).load() is env.load()
    with pytest.raises(InputError, match="cannot go into a TOML file"):
        env.to_toml()
    with pytest.raises(InputError, match="the keys differ"):
        env.replace(clients=(Client(key="a"), Client(key="z")))
    with pytest.raises(InputError, match="use 'given'"):
        env.replace(partition={"kind": "iid"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": {"a": 1}}, "field epochs: b is missing"),
        (
            {"participation_probability": {"a": 1.0, "b": 1.0, "c": 1.0}},
            "field participation_probability: c names no client",
        ),
        ({"participation_probability": {"a": 1.0, "b": 1.5}}, "participation_probability: must be at most 1, got 1.5"),
        ({"epochs": (1, 2)}, "client a: epochs has 2 entries for 3 rounds"),
        ({"clients_per_round": 3}, "field clients_per_round: must be at most 2"),
        ({"model": (0,)}, "field hidden.0: must be at least 1"),
        ({"lr": 0.0}, "field lr: must be more than 0, got 0.0"),
    ],
)
def test_wrong_settings_in_the_program_are_input_errors(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        in_memory(**options)
    assert named in str(caught.value) and "\n" not in str(caught.value)


FILE = """
name = "own"
rounds = {rounds}
batch_size = 4
lr = 0.1
data = {data}
partition = {partition}
clients = {clients}
{more}
"""


def written(folder: Path, **parts: str) -> Path:
    """A small file whose parts can be replaced."""
    defaults = {
        "rounds": "2",
        "data": '{source = "digits"}',
        "partition": '{kind = "iid"}',
        "clients": '[{key = "a"}, {key = "b"}]',
        "more": "",
    }
    path = folder / "own.toml"
    path.write_text(FILE.format(**defaults | parts))
    return path


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"rounds": "0"}, "field rounds: must be at least 1, got 0"),
        ({"rounds": '"2"'}, "field rounds: must be a valid integer, got '2'"),
        ({"rounds": "true"}, "field rounds"),
        ({"rounds": "= ="}, "is not valid TOML"),
        ({"more": "seed = -1"}, "field seed: must be at least 0"),
        ({"more": "clients_per_round = 0"}, "field clients_per_round: must be at least 1"),
        ({"more": "clients_per_round = 3"}, "field clients_per_round: must be at most 2"),
        ({"more": "epoch = 3"}, "field epoch: is not a known field"),
        (
            {"clients": '[{key = "a"}, {key = "b", participation_probability = 1.5}]'},
            "clients.1.participation_probability: must be at most 1, got",
        ),
        (
            {"clients": '[{key = "a"}, {key = "b", participation_probability = nan}]'},
            "clients.1.participation_probability: must be a finite",
        ),
        ({"clients": '[{key = "a"}, {key = "a"}]'}, "the key a is used 2 times"),
        ({"clients": '[{key = ""}]'}, "field clients.0.key"),
        ({"clients": '[{key = "a b"}]'}, "field clients.0.key"),
        ({"clients": '[{key = "a\\n"}]'}, "field clients.0.key"),
        ({"clients": "[{epochs = 1}]"}, "field clients.0.key: is missing"),
        ({"clients": "[]"}, "lists no client"),
        ({"clients": "3"}, "field clients"),
        ({"clients": '[{key = "a", count = 0}]'}, "count must be an integer of at least 1"),
        (
            {"clients": '[{key = "a", epochs = 0}]'},
            "field clients.0.epochs: must be an integer of at least 1",
        ),
        ({"clients": '[{key = "a", epochs = [1, 0]}]'}, "field clients.0.epochs"),
        ({"clients": '[{key = "a", epochs = [1]}]'}, "client a: epochs has 1 entries for 2 rounds"),
        ({"data": '{source = "cifar"}'}, "field data: 'source' must be one of 'digits'"),
        ({"data": "{}"}, "field data: needs 'source'"),
        ({"data": '{source = "npz"}'}, "field data.path: is missing"),
        ({"partition": '{kind = "given"}'}, "field partition: 'given' needs arrays per client"),
        (
            {"partition": '{kind = "sizes", sizes = [3]}'},
            "field partition.sizes: has 1 entries for 2 clients",
        ),
        (
            {"partition": '{kind = "sizes", sizes = [3, 0]}'},
            "field partition.sizes.1: must be at least 1, got 0",
        ),
        ({"partition": '{kind = "labels", labels = [[1]]}'}, "field partition.labels: has 1 entries"),
        ({"partition": '{kind = "indices", indices = [[1]]}'}, "field partition.indices: has 1 entries"),
        (
            {"partition": '{kind = "dirichlet", alpha = 0}'},
            "field partition.alpha: must be at least 1e-09, got 0",
        ),
    ],
)
def test_wrong_files_are_explained_in_one_line(tmp_path: Path, parts: dict[str, str], named: str) -> None:
    path = written(tmp_path, **parts)
    with pytest.raises(InputError) as caught:
        environment(path)
    message = str(caught.value)
    assert message.startswith(f"environment file {path}: ")
    assert named in message and "\n" not in message


def test_several_mistakes_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"got 0 \(and 1 more\)$"):
        environment(written(tmp_path, rounds="0", more="seed = -1"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.toml").mkdir()
    for name in ("absent.toml", "binary.toml", "folder.toml"):
        with pytest.raises(InputError) as caught:
            environment(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_name_suggests_a_bundled_one() -> None:
    with pytest.raises(InputError, match="did you mean 'digits-label-skew'"):
        environment("digits-labelskew")
    with pytest.raises(InputError, match=r"digits-flaky.* ends in \.toml"):
        environment("zzz")


def test_own_npz_is_found_beside_the_file(tmp_path: Path) -> None:
    (x, y), test = pair(20), pair(4)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=test[0], y_test=test[1])
    env = environment(written(tmp_path, data='{source = "npz", path = "own.npz"}'))
    assert env.load().sizes == (10, 10)
    assert env.replace(clients=env.clients[:1]).load().sizes == (20,)
    with pytest.raises(InputError, match=r"own\.npz has x_train, so it is not divided"):
        env.replace(partition={"kind": "given"}).load()


def test_npz_divided_already(tmp_path: Path) -> None:
    arrays = {f"{axis}_{key}": value for key in ("a", "b", "test") for axis, value in zip("xy", pair(6), strict=True)}
    np.savez(tmp_path / "own.npz", **arrays)
    source = {"data": '{source = "npz", path = "own.npz"}', "partition": '{kind = "given"}'}
    swapped = environment(written(tmp_path, clients='[{key = "b"}, {key = "a"}]', **source))
    assert swapped.load().keys == ("b", "a")
    for clients, named in (
        ('[{key = "a"}]', "client b is only in the data"),
        ('[{key = "a"}, {key = "b"}, {key = "c"}]', "client c is only in the environment"),
    ):
        with pytest.raises(InputError, match=named):
            environment(written(tmp_path, clients=clients, **source)).load()


def test_class_names_say_how_many_classes_there_are(tmp_path: Path) -> None:
    (xa, ya), (xb, yb), (xt, yt) = pair(5), pair(7, 1), pair(2, 2)
    np.savez(tmp_path / "own.npz", x_a=xa, y_a=ya, x_b=xb, y_b=yb, x_test=xt, y_test=yt)
    source = {"data": '{source = "npz", path = "own.npz"}', "partition": '{kind = "given"}'}
    env = environment(written(tmp_path, **source, more='class_names = ["ill", "well", "unseen"]'))
    assert env.load().classes == 3 and env.load().label_counts[:, 2].tolist() == [0, 0]
    assert [env.class_name(c) for c in range(3)] == ["ill", "well", "unseen"]
    assert environment(written(tmp_path, **source)).class_name(1) == "1"
    (tmp_path / "again.toml").write_text(env.to_toml())
    assert environment(tmp_path / "again.toml") == env
    digits = environment(written(tmp_path, more='class_names = ["even", "odd"]'))
    with pytest.raises(InputError, match="has the label 9 but there are 2 classes"):
        digits.load()
    with pytest.raises(InputError, match="field class_names"):
        environment(written(tmp_path, more='class_names = ["all"]'))
    assert in_memory().replace(class_names=("ill", "well")).class_name(0) == "ill"
    with pytest.raises(InputError, match="field class_names: name the data's 2 classes"):
        in_memory().replace(class_names=("ill", "well", "unseen"))


def test_label_and_index_partitions_from_a_file(tmp_path: Path) -> None:
    by_label = '{kind = "labels", labels = [[0], [1, 2]], sizes = [5, 7]}'
    assert environment(written(tmp_path, partition=by_label)).load().label_counts[:, :3].tolist() == [
        [5, 0, 0],
        [0, 4, 3],
    ]
    by_index = '{kind = "indices", indices = [[0, 5], [3]]}'
    assert environment(written(tmp_path, partition=by_index)).load().sizes == (2, 1)


@pytest.mark.skipif(not os.environ.get("FEDUNFOLD_DATA"), reason="FEDUNFOLD_DATA names no folder with the features")
def test_dogs_come_near_the_papers_sizes() -> None:
    """Published: 3295, 3345, 1868, 3178 and 4773 samples; the drawn partition is within 9 % of each."""
    data = environment("dogs-a").load()
    for size, published in zip(data.sizes, (3295, 3345, 1868, 3178, 4773), strict=True):
        assert abs(size / published - 1) < 0.09
    assert data.classes == 120


def test_features_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDUNFOLD_DATA", raising=False)
    with pytest.raises(InputError, match=r"no features file dogs_deit_tiny\.npz .*extract the features"):
        environment("dogs-b").load()

"""The task of an environment, in a file and in Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.errors import InputError

NPZ = """
name = "heights"
rounds = 2
batch_size = 4
lr = 0.1
task = {name = "regression", loss = "huber", delta = 2.0}

[data]
source = "npz"
path = "heights.npz"

[partition]
kind = "PARTITION"

[[clients]]
key = "a"

[[clients]]
key = "b"
"""


def arrays(folder: Path, y: Any) -> None:
    x = np.linspace(0, 1, 24).reshape(12, 2)
    np.savez(folder / "heights.npz", x_train=x, y_train=y, x_test=x, y_test=y)


def test_it_is_read_from_a_file_and_written_again(tmp_path: Path) -> None:
    arrays(tmp_path, np.linspace(1.5, 2.0, 12))
    (tmp_path / "heights.toml").write_text(NPZ.replace("PARTITION", "iid"))
    env = Environment.from_toml(tmp_path / "heights.toml")
    assert env.task == fu.regression("huber", delta=2.0)
    (tmp_path / "again.toml").write_text(env.to_toml(tmp_path))
    assert Environment.from_toml(tmp_path / "again.toml") == env
    result = fu.run(env, fu.size())
    assert set(result.evaluations[-1].metrics) == {"rmse", "mae", "r2"}


def test_another_task_is_another_federation() -> None:
    x, y = np.eye(4), np.array([0, 1, 0, 1])
    made = [
        Environment.from_arrays({"a": (x, y)}, (x, y), task=task, rounds=1, batch_size=2, lr=0.1)
        for task in (fu.classification(2), fu.binary(), fu.regression())
    ]
    assert len({env.digest(env.load()) for env in made}) == 3


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ('{name = "regresion"}', "field task: unknown task 'regresion'; did you mean 'regression'?"),
        ('{name = "regression", deltas = 1.0}', "field task: task 'regression' has no setting 'deltas'"),
        ('{loss = "mse"}', "field task: needs a name, one of classification, binary"),
        ('{name = "classification"}', "field task: task 'classification' needs the setting 'classes'"),
        ("3", "field task: "),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, task: str, message: str) -> None:
    file = tmp_path / "odd.toml"
    line = next(line for line in NPZ.splitlines() if line.startswith("task"))
    file.write_text(NPZ.replace(line, f"task = {task}").replace("PARTITION", "iid"))
    with pytest.raises(InputError) as caught:
        Environment.from_toml(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_cannot_be_divided_by_class(tmp_path: Path) -> None:
    arrays(tmp_path, np.linspace(1.5, 2.0, 12))
    (tmp_path / "heights.toml").write_text(NPZ.replace('"PARTITION"', '"dirichlet"\nalpha = 1.0'))
    with pytest.raises(InputError, match="'dirichlet' divides by class; use iid, sizes or indices here"):
        Environment.from_toml(tmp_path / "heights.toml").load()


def test_targets_in_a_file_are_checked(tmp_path: Path) -> None:
    y = np.linspace(1.5, 2.0, 12)
    y[3] = np.nan
    arrays(tmp_path, y)
    (tmp_path / "heights.toml").write_text(NPZ.replace("PARTITION", "iid"))
    with pytest.raises(InputError, match=r"y_train in .*heights.npz has a NaN or infinite value in row 3"):
        Environment.from_toml(tmp_path / "heights.toml").load()


def test_inputs_by_name_need_a_model_of_their_own() -> None:
    x, y = {"ids": np.ones((4, 2), dtype=int), "mask": np.ones((4, 2), dtype=bool)}, np.array([0, 1, 0, 1])
    env = Environment.from_arrays({"a": (x, y)}, (x, y), rounds=1, batch_size=2, lr=0.1)
    with pytest.raises(InputError, match="The inputs ids, mask need a model of your own"):
        fu.run(env, fu.size())
    with pytest.raises(InputError, match=r"x of client b has other inputs than x of client a \(ids, mask\)"):
        Environment.from_arrays({"a": (x, y), "b": ({"ids": x["ids"]}, y)}, (x, y), rounds=1, batch_size=2, lr=0.1)

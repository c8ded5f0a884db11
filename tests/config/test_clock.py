"""The clock of an environment: its fields, its trace from a file, and its place in a TOML file."""

from pathlib import Path
from typing import Any

import pytest

from fedunfold.config import Environment
from fedunfold.config.clock import Clock, Training, client_times
from fedunfold.core.errors import InputError
from tests.support.federations import tiny

TOML = """
name = "timed"
rounds = 2
batch_size = 20
lr = 0.1
[clock]
trace = "trace.csv"
buffer = 1
[data]
source = "digits"
[partition]
kind = "iid"
[[clients]]
key = "site"
count = 2
"""


def timed(folder: Path, trace: str) -> Environment:
    (folder / "trace.csv").write_text(trace)
    (folder / "env.toml").write_text(TOML)
    return Environment.from_toml(folder / "env.toml")


def test_a_trace_is_read_from_a_file_beside_the_environment(tmp_path: Path) -> None:
    env = timed(tmp_path, "client,seconds,lost\nsite-0, 1.5, 0\nsite-1,2,1\nsite-0,3,0\n")
    times = client_times(env, env.load())
    assert times.trace == {"site-0": ((1.5, False), (3.0, False)), "site-1": ((2.0, True),)}


def test_a_saved_environment_still_finds_its_trace(tmp_path: Path) -> None:
    env = timed(tmp_path, "client,seconds\nsite-0,1\nsite-1,2\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "again.toml").write_text(env.to_toml(tmp_path / "inner"))
    again = Environment.from_toml(tmp_path / "inner" / "again.toml")
    assert client_times(again, again.load()).trace == client_times(env, env.load()).trace


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("", "must begin with the line client,seconds or client,seconds,lost"),
        ("seconds,client\n1,site-0\n", "must begin with the line"),
        ("client,seconds\nsite-0\n", r"trace\.csv line 2 must be a client, its seconds above 0, with commas"),
        ("client,seconds\nsite-0,1\nsite-1,0\n", r"trace\.csv line 3"),
        ("client,seconds\nsite-0,inf\n", r"trace\.csv line 2"),
        ("client,seconds,lost\nsite-0,1,yes\n", r"line 2 must be .* and 0 or 1 for lost"),
        ("client,seconds\nsite-0,1\n", "no row for client 'site-1'"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_sentence(tmp_path: Path, trace: str, message: str) -> None:
    env = timed(tmp_path, trace)
    with pytest.raises(InputError, match=message):
        client_times(env, env.load())


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    env = timed(tmp_path, "")
    (tmp_path / "trace.csv").unlink()
    with pytest.raises(InputError, match=r"field clock\.trace: .*trace\.csv cannot be read .* check the path"):
        client_times(env, env.load())


def test_without_a_clock_a_local_step_takes_a_second() -> None:
    env = tiny()
    times = client_times(env, env.load())
    assert [times.seconds("trial-0", k, 0, 0) for k in range(3)] == [3.0, 4.0, 6.0]
    slow = client_times(env.replace(clock=Clock(seconds_per_step=0.5)), env.load())
    assert [slow.seconds("trial-0", k, 0, 0) for k in range(3)] == [1.5, 2.0, 3.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds_per_step", 0), ("speed_spread", -1), ("delay", float("nan")), ("buffer", 0), ("limit", 0)],
)
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"field {field}"):
        Clock(**{field: value})
    with pytest.raises(InputError, match="field seconds"):
        Training(client="a", seconds=0)

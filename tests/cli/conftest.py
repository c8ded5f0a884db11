"""A command typed in a test."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedunfold.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts what it puts in the background with SIGINT ignored, and these tests with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fedunfold(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return run


@pytest.fixture
def site_data(tmp_path: Path) -> dict[str, Any]:
    """Arrays of two clients and a test set, to be written by the test."""
    stream = np.random.default_rng(0)

    def pair(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return stream.normal(size=(n, 4)).astype(np.float32), np.arange(n) % classes

    (xa, ya), (xb, yb), (xt, yt) = pair(9, 2), pair(6, 3), pair(6, 3)
    return {"x_a": xa, "y_a": ya, "x_b": xb, "y_b": yb, "x_test": xt, "y_test": yt}


TOML = """
name = "two-sites"
rounds = 3
batch_size = 4
lr = {lr}
{extra}
[data]
source = "npz"
path = "data.npz"
[partition]
kind = "given"
[[clients]]
key = "a"
[[clients]]
key = "b"
epochs = 2
participation_probability = {participation_probability}
"""


@pytest.fixture
def two_sites(tmp_path: Path, site_data: dict[str, Any]) -> Callable[..., Path]:
    """Writes a small federation of one's own; arguments change a setting or an array."""

    def write(lr: float = 0.1, participation_probability: float = 1.0, extra: str = "", **arrays: Any) -> Path:
        np.savez(tmp_path / "data.npz", **{**site_data, **arrays})
        path = tmp_path / "mine.toml"
        path.write_text(TOML.format(lr=lr, participation_probability=participation_probability, extra=extra))
        return path

    return write

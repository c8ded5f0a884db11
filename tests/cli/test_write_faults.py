"""Every single step of writing fails once: nothing damaged, one line, and the same bytes when it is gone on with."""

import builtins
import errno
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from safetensors.torch import load

from fedunfold import plotting
from fedunfold.studies import cases, figures
from tests.cli.conftest import Command

Federation = Callable[..., Path]
TIMED = ("made.json", "learning.json", "trial-0.json")


class Faults:
    """Counts the steps of writing in folders of a name, and lets the n-th one fail."""

    def __init__(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self.count, self.failing = folder, 0, 0
        self._real = {name: getattr(os, name) for name in ("open", "mkdir", "replace")}
        for name in self._real:
            monkeypatch.setattr(os, name, self._watched(name))
        monkeypatch.setattr(os, "fsync", lambda _: self.step())  # really waiting for the disk would only take time
        monkeypatch.setattr(io, "open", self._open)
        monkeypatch.setattr(builtins, "open", self._open)

    def let_fail(self, n: int) -> None:
        self.count, self.failing = 0, n

    def step(self) -> None:
        self.count += 1
        if self.count == self.failing:
            number = errno.ENOSPC if self.count % 2 else errno.EIO
            raise OSError(number, os.strerror(number))

    def _below(self, path: Any) -> bool:
        return self._folder in Path(str(path)).parts

    def _watched(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._below(path) and not (name == "mkdir" and Path(path).is_dir()):
                self.step()
            return self._real[name](path, *args, **kwargs)

        return call

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not (self._below(file) and set(mode) & set("wax+")):
            return REAL_OPEN(file, mode, buffering, *args, **kwargs)
        self.step()
        raw = Failing(file, mode.replace("b", ""), self)
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **kwargs)


REAL_OPEN = open


class Failing(io.FileIO):
    def __init__(self, file: Any, mode: str, faults: Faults) -> None:
        super().__init__(file, mode)
        self._faults = faults

    def write(self, content: Any) -> int:
        self._faults.step()
        return super().write(content)


def check_whole(folder: Path) -> None:
    """No file is half-written, and none is left over."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        content = file.read_bytes()
        assert not file.name.startswith("."), f"{file} was left over"
        match file.suffix:
            case ".safetensors":
                assert load(content)
            case ".json":
                assert json.loads(content)
            case ".jsonl":
                assert [json.loads(line) for line in content.splitlines()]
            case _:
                assert content


def content(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in TIMED]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


COMMANDS: dict[str, tuple[str, ...]] = {
    "learn": ("learn", "mine.toml", "--iterations", "2"),
    "run": ("run", "mine.toml", "--out", "runs/mine"),
    "compare": ("compare", "mine.toml", "--methods", "fedavg,duw-fedavg", "--trials", "1", "--iterations", "1"),
    "reproduce": ("reproduce", "digits", "--trials", "1", "--jobs", "1", "--only", "fedavg", "--only", "duw-fedavg"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_step_of_writing_can_fail(
    fedunfold: Command,
    two_sites: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    env = two_sites()
    env.write_text(env.read_text().replace("rounds = 3", "rounds = 2"))  # enough for one checkpoint before another
    monkeypatch.setattr("fedunfold.io.checkpoint.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(cases, "ENVIRONMENTS", {"digits": (str(env),)})
    monkeypatch.setattr(cases, "FAST", {"iterations": 2, "lr": 0.02})
    # What is drawn is not the matter here, only that it is written.
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: Path(file).write_bytes(b"a figure"))
    monkeypatch.setattr(figures, "composite", lambda *_: Figure())
    for drawn in ("scores", "weights", "outer_loss"):
        monkeypatch.setattr(plotting, drawn, lambda _: Figure())
    whole = fedunfold(*command)
    assert whole.code == 0, whole.err
    expected = content(tmp_path / "runs")
    faults = Faults("runs", monkeypatch)
    n = 0
    while True:
        n += 1
        (tmp_path / "runs").rename(tmp_path / f"before-{n}")
        faults.let_fail(n)
        failed = fedunfold(*command)
        if faults.count < n:
            break
        faults.let_fail(0)
        if "JsonLines failed" in failed.err:  # only the live file, which the run goes on without
            assert failed.code == 0, n
            found = content(tmp_path / "runs")
            assert {name: file for name, file in found.items() if not name.endswith("progress.jsonl")} == expected, n
            continue
        assert failed.code == 2, n
        *notes, error = failed.err.splitlines()
        assert not notes, n
        assert error.startswith("error: ")
        assert "No space left on device" in error or "Input/output error" in error, error
        check_whole(tmp_path / "runs")
        again = fedunfold(*command)
        assert again.code == 0, (n, again.err)
        assert content(tmp_path / "runs") == expected, (n, error)
    assert n > 40, "so many steps there are at least"


def test_a_real_limit_on_the_size_of_files(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    """The system itself refuses to write more than 2 kB to a file."""
    two_sites()
    command = ["learn", "mine.toml", "--iterations", "2", "--out", "cut"]
    program = [sys.executable, "-m", "fedunfold", *command]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

    failed = subprocess.run(program, cwd=tmp_path, preexec_fn=limited, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: cannot write")
    assert "File too large" in failed.stderr
    assert failed.stderr.count("\n") == 1
    if (tmp_path / "cut").exists():
        check_whole(tmp_path / "cut")
    assert fedunfold(*command).code == 0
    check_whole(tmp_path / "cut")

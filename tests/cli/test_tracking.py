"""`--track` on the command line: what it refuses, and what does not end a run."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedunfold.tracking.jsonl import JsonLines
from fedunfold.tracking.tensorboard import TensorBoard
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused
from tests.cli.test_stopping import interrupt_after, interrupted

Federation = Callable[..., Path]


def test_an_unknown_tracker(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    refused(fedunfold("run", two_sites(), "--track", "tensorbord", "--out", "kept"), "did you mean 'tensorboard'?")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("tracker", "module"), [("tensorboard", "torch.utils.tensorboard.writer"), ("mlflow", "mlflow")]
)
def test_without_the_extra(
    fedunfold: Command, two_sites: Federation, monkeypatch: pytest.MonkeyPatch, tracker: str, module: str
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("fedunfold.tracking.mlflow.find_spec", lambda name: None if name == module else there(name))
    refused(fedunfold("run", two_sites(), "--track", tracker), "pip install 'fedunfold[tracking]'")


@pytest.mark.parametrize("where", ["tensorboard:file/below", "mlflow:file/below/store.db", "mlflow"])
def test_a_tracker_that_cannot_write_is_told_of_once(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "file").touch()
    ran = fedunfold("run", two_sites(), "--track", where, "--out", "kept", "--format", "json")
    assert ran.code == 0
    assert len(ran.json["rounds"]) == 3
    assert ran.err.startswith("warning: ") and ran.err.endswith("the run continues without it.\n")
    assert ran.err.count("\n") == 1
    assert ("127.0.0.1" if where == "mlflow" else "file") in ran.err
    assert (tmp_path / "kept" / "model.safetensors").exists()


def test_runs_are_tracked_apart(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    for _ in range(2):
        assert fedunfold("run", two_sites(), "--track", "tensorboard:logs").code == 0
    assert {folder.name for folder in (tmp_path / "logs").iterdir()} == {"run-two-sites", "run-two-sites-2"}
    assert not (tmp_path / "runs").exists()


def test_a_failing_live_file_does_not_end_the_run(
    fedunfold: Command, two_sites: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "_write", full)
    learned = fedunfold("learn", two_sites(), "--iterations", 2, "--out", "kept")
    assert learned.code == 0
    assert learned.err.count("No space left on device") == 1


def test_a_killed_run_leaves_its_progress(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that are never written are what a kill comes to; a second run in the same folder then tidies up."""
    env = two_sites()
    with monkeypatch.context() as patch:
        patch.setattr("fedunfold.runs.folder.RunFolder.write", interrupted)
        assert fedunfold("run", env, "--out", "runs/cut").code == 130
    lines = [json.loads(line) for line in (tmp_path / "runs" / "cut" / "progress.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "round" in line] == [0, 1, 2]
    (listed,) = fedunfold("runs", "list", "--format", "json").json
    assert (listed["state"], listed["environment"], listed["methods"]) == ("unfinished", "two-sites", ["fedavg"])
    assert fedunfold("run", env, "--out", "runs/cut").code == 0
    (listed,) = fedunfold("runs", "list", "--format", "json").json
    assert listed["state"] == "finished"


def test_what_was_kept_before_ctrl_c_is_tracked(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(TensorBoard, "on_end", lambda _, failure: heard.append(failure))
    monkeypatch.setattr(TensorBoard, "on_artifacts", lambda _, files: heard.append(sorted(file.name for file in files)))
    interrupt_after(1, monkeypatch)
    assert fedunfold("learn", two_sites(), "--out", "cut", "--track", "tensorboard:logs").code == 130
    ended, kept = heard
    assert isinstance(ended, KeyboardInterrupt)
    assert kept == sorted(file.name for file in (tmp_path / "cut").iterdir() if file.is_file())

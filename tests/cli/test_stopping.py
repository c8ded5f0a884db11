"""Ctrl-C and failures half-way: one line, the right exit code, and nothing finished is lost."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedunfold.cli.trackers import ProgressTracker
from fedunfold.core.errors import DivergenceError
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import CallbackList
from fedunfold.training import trials
from tests.cli.conftest import Command

Federation = Callable[..., Path]


def interrupt_after(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, as the signal it is, once so many outer iterations have been reported."""
    report = ProgressTracker.on_outer_step

    def reported(self: ProgressTracker, method: str, so_far: LearnedWeights, total: int) -> None:
        report(self, method, so_far, total)
        if len(so_far.losses) == iterations:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressTracker, "on_outer_step", reported)


def fail_in(method: str, trial: int, failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure once this trial of a method has been told of."""
    told = CallbackList.on_trial_end

    def failing(self: CallbackList, name: str, done: int, trials: int, result: RunResult) -> None:
        told(self, name, done, trials, result)
        if (name, done) == (method, trial):
            raise failure

    monkeypatch.setattr(CallbackList, "on_trial_end", failing)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_interrupted_learning_keeps_what_was_learned(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(3, monkeypatch)
    stopped = fedunfold("learn", two_sites(), "--iterations", 50, "--out", tmp_path / "cut")
    assert stopped.code == 130
    assert (
        stopped.err
        == "stopped after 3 of 50 outer iterations; what was learned is saved, and the same command resumes.\n"
    )
    assert len(LearnedWeights.load(tmp_path / "cut" / "weights.safetensors").losses) == 3


def test_interrupted_before_anything_was_learned(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedunfold.unfolding.learner.unroll_and_grad", interrupted)
    stopped = fedunfold("learn", two_sites(), "--out", tmp_path / "cut")
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "stopped before the first outer iteration; nothing was saved.\n"
    assert not (tmp_path / "cut").exists()


def test_interrupted_run(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "run_rounds", interrupted)
    stopped = fedunfold("run", two_sites(), "--out", tmp_path / "cut")
    assert (stopped.code, stopped.out, stopped.err) == (130, "", "stopped.\n")
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_interrupted_while_modules_are_loaded(module: str) -> None:
    program = f"""
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
from fedunfold.cli import main
sys.meta_path.insert(0, Interrupting())
main(["run", "digits-flaky"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped.\n")


def test_interrupted_comparison_keeps_finished_methods(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2, monkeypatch)
    out = tmp_path / "cut"
    methods = "fedavg,duw-fedavg"
    stopped = fedunfold("compare", two_sites(), "--methods", methods, "--trials", 2, "--out", out, "--format", "json")
    assert stopped.code == 130
    assert stopped.err.startswith("stopped; ") and str(out) in stopped.err
    assert [entry["method"] for entry in stopped.json["methods"]] == ["fedavg"]
    assert (stopped.json["folder"], stopped.json["stopped"]) == (str(out), True)
    assert len(LearnedWeights.load(out / "duw-fedavg.safetensors").losses) == 2


@pytest.mark.parametrize("format", ["text", "json"])
def test_comparison_interrupted_before_its_first_trial(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(trials, "run_rounds", interrupted)
    stopped = fedunfold("compare", two_sites(), "--format", format)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "stopped before the first trial ended; nothing was saved.\n"
    assert not list((tmp_path / "runs").iterdir())


def test_comparison_interrupted_while_it_learns_keeps_the_weights(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2, monkeypatch)
    stopped = fedunfold("compare", two_sites(), "--methods", "duw-fedavg", "--out", "cut")
    assert stopped.code == 130
    assert (
        stopped.err
        == "stopped before the first trial ended; weights so far are saved in cut, and the same command resumes.\n"
    )
    assert "┃" not in stopped.out
    assert {file.name for file in (tmp_path / "cut").iterdir()} == {
        *("settings.json", "environment.toml", "federation.json", "unfinished"),
        *("duw-fedavg.safetensors", "duw-fedavg-weights.png", "duw-fedavg-outer-loss.png"),
    }


def rows(table: str) -> list[list[str]]:
    """The cells under the heads of a table."""
    lines = table.split("───\n")[1].splitlines()
    return [re.split(r"  +", line.strip()) for line in itertools.takewhile(lambda line: " ± " in line, lines)]


def test_methods_say_how_many_trials_they_had(
    fedunfold: Command, two_sites: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in("fednova", 1, KeyboardInterrupt(), monkeypatch)
    stopped = fedunfold("compare", two_sites(), "--methods", "fedavg,fednova,fedprox", "--trials", 3)
    assert stopped.code == 130
    assert [(row[0], "3" in row, "2" in row) for row in rows(stopped.out)] == [
        ("fedavg", True, False),
        ("fednova", False, True),
    ]
    assert " trials" in stopped.out


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_failing_method_does_not_take_finished_ones_along(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    fail_in("fednova", 0, DivergenceError("round 3: client 'b' diverged."), monkeypatch)
    methods = ("--methods", "fedavg,duw-fedavg,fednova", "--iterations", 1, "--trials", 2)
    failed = fedunfold("compare", two_sites(), *methods, "--out", "kept", "--format", format)
    assert failed.code == 2
    assert failed.err == "error: round 3: client 'b' diverged.\n"
    result: dict[str, Any] = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert [entry["method"] for entry in result["methods"]] == ["fedavg", "duw-fedavg"]
    assert (tmp_path / "kept" / "duw-fedavg.safetensors").exists()
    if format == "json":
        shown = failed.json
        assert shown.pop("verdict")["learning_rounds"] in (0, 3) and shown.pop("warnings") == []
        assert shown == result | {"folder": "kept"}
    else:
        assert [row[0] for row in rows(failed.out)] == ["fedavg", "duw-fedavg"]
        assert "; 2 trials (%)" in failed.out


TRIALS = 8


def study(out: Path, jobs: int) -> tuple[str, ...]:
    """A small one: two learnings, and so many trials of three methods that not all end at once."""
    only = ("digits-flaky", "fedavg", "duw-fedavg", "duw-fednova")
    names = [part for name in only for part in ("--only", name)]
    return ("reproduce", "digits", "--trials", str(TRIALS), "--jobs", str(jobs), "--out", str(out), *names)


def reproduce(out: Path) -> list[str]:
    """The program that makes it with two workers."""
    return [sys.executable, "-m", "fedunfold", *study(out, jobs=2)]


@pytest.fixture
def checkpoint_every_step(tmp_path: Path) -> dict[str, str]:
    """An environment in which every Python process, workers too, keeps each step: none is too fast to be cut."""
    (tmp_path / "sitecustomize.py").write_text(
        "from fedunfold.io import checkpoint\ncheckpoint.CHECKPOINT_SECONDS = 0.0\n"
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_a_killed_reproduction_goes_on_and_ends_the_same(
    fedunfold: Command, tmp_path: Path, checkpoint_every_step: dict[str, str]
) -> None:
    """SIGKILL, twice: when a learning has a checkpoint, and when the first trial is there. What is never killed is made
    in this process."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert fedunfold(*study(whole, jobs=1)).code == 0
    for awaited in ("checkpoint-learning.safetensors", "trial-*.json"):
        process = subprocess.Popen(reproduce(cut), stdout=subprocess.DEVNULL, env=checkpoint_every_step)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if list(cut.glob(f"records/*/*/{awaited}")):
                break
        assert process.poll() is None, "ended before it could be killed"
        process.kill()
        process.wait()
    assert not (cut / "results.md").exists()
    ended = fedunfold(*study(cut, jobs=1), "--format", "json")
    assert ended.code == 0, ended.err
    assert 0 < ended.json["computed"] < 2 + 3 * TRIALS
    assert (cut / "results.md").read_bytes() == (whole / "results.md").read_bytes()
    assert (cut / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_an_interrupted_reproduction_says_how_to_go_on(
    fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedunfold.studies.processes.run_jobs", interrupted)
    stopped = fedunfold(*study(tmp_path / "cut", jobs=2))
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err.startswith("stopped; the same command resumes from the records in")


def test_ctrl_c_at_the_terminal_is_one_line_even_while_workers_start(tmp_path: Path) -> None:
    """The terminal sends it to the whole group of processes."""
    process = subprocess.Popen(
        reproduce(tmp_path / "cut"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "cut" / "records" / "digits-flaky" / "data.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("stopped; the same command resumes")
    assert err.count("\n") == 1

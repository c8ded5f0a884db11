"""A run that did not end is gone on with by the same command; another one never takes its place unasked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedunfold.core.run_result import RunResult
from fedunfold.io.atomic import FolderLock
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import CallbackList
from fedunfold.training.comparison import Comparison
from tests.cli.conftest import Command, Outcome
from tests.cli.test_bad_input import refused
from tests.cli.test_write_faults import content

Federation = Callable[..., Path]
LEARN = ("learn", "mine.toml", "--iterations", 4)
COMPARE = ("compare", "mine.toml", "--methods", "duw-fedavg,fednova", "--trials", 2, "--iterations", 2)


class Crash(BaseException):
    """Nothing catches it."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, two_sites: Federation) -> None:
    """A checkpoint after every step, and the federation beside us."""
    monkeypatch.setattr("fedunfold.io.checkpoint.CHECKPOINT_SECONDS", 0.0)
    two_sites()


@pytest.fixture
def crash(fedunfold: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a command that breaks off after so many outer iterations, or in a method's trial."""

    def run(*command: object, iterations: int = 0, method: str = "") -> None:
        def learning(self: CallbackList, name: str, so_far: LearnedWeights, total: int) -> None:
            if len(so_far.losses) == iterations:
                raise Crash

        def trial(self: CallbackList, name: str, done: int, trials: int, result: RunResult) -> None:
            if name == method:
                raise Crash

        with monkeypatch.context() as patched, pytest.raises(Crash):
            patched.setattr(CallbackList, "on_outer_step", learning)
            patched.setattr(CallbackList, "on_trial_end", trial)
            fedunfold(*command)

    return run


def numbers(folder: Path) -> dict[str, bytes]:
    """Weights and metrics, without the figures and what names folders."""
    endings = (".safetensors", "metrics.jsonl", "result.json")
    return {name: found for name, found in content(folder).items() if name.endswith(endings)}


def succeeded(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_learning_goes_on_by_itself(fedunfold: Command, crash: Callable[..., None], tmp_path: Path) -> None:
    succeeded(fedunfold(*LEARN, "--out", "whole"))
    crash(*LEARN, "--out", "cut", iterations=3)
    assert not (tmp_path / "cut" / "settings.json").exists()
    went_on = succeeded(fedunfold(*LEARN, "--out", "cut"))
    where = "cut/unfinished/learning.safetensors"
    assert went_on.err == (
        f"resuming the unfinished run in cut\nresuming from outer iteration 3 of 4, saved in {where}\n"
    )
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert not (tmp_path / "cut" / "unfinished").exists()


@pytest.mark.parametrize("crashing", [{"iterations": 1}, {"method": "duw-fedavg"}, {"method": "fednova"}])
def test_a_comparison_goes_on(
    fedunfold: Command, crash: Callable[..., None], tmp_path: Path, crashing: dict[str, object]
) -> None:
    succeeded(fedunfold(*COMPARE, "--out", "whole"))
    crash(*COMPARE, "--out", "cut", **crashing)
    assert "unfinished run in cut" in succeeded(fedunfold(*COMPARE, "--out", "cut", "--resume")).err
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_a_run_goes_on(fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "mine.toml", "--server", "adam", "--absent", "remember", "--out")
    succeeded(fedunfold(*command, "whole"))
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr("fedunfold.runs.artifacts.trained_module", raising(Crash()))
        fedunfold(*command, "cut")
    succeeded(fedunfold(*command, "cut"))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def raising(error: BaseException) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise error

    return call


def test_without_a_folder_the_unfinished_one_is_found(
    fedunfold: Command, crash: Callable[..., None], tmp_path: Path
) -> None:
    succeeded(fedunfold(*LEARN))
    crash(*LEARN, iterations=2)
    crash(*LEARN, "--seed", 5, iterations=2)
    assert "unfinished run in runs/learn-two-sites-2\n" in succeeded(fedunfold(*LEARN)).err
    assert "unfinished run in runs/learn-two-sites-3\n" in succeeded(fedunfold(*LEARN, "--seed", 5, "--resume")).err
    succeeded(fedunfold(*LEARN))
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_resume_insists(fedunfold: Command, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    for command in (LEARN, COMPARE, ("run", "mine.toml")):
        refused(fedunfold(*command, "--out", "new", "--resume"), "new", "--resume")
    refused(fedunfold(*LEARN, "--resume"), "runs/learn-two-sites", "--resume")
    refused(fedunfold("run", "mine.toml", "--resume"), "--out")
    refused(fedunfold("reproduce", "digits", "--out", "new", "--resume"), "new", "no records")
    assert set(tmp_path.iterdir()) == before


def test_other_settings_are_refused_with_the_first_difference(
    fedunfold: Command, crash: Callable[..., None], two_sites: Federation, tmp_path: Path
) -> None:
    crash(*LEARN, "--out", "cut", iterations=2)
    before = content(tmp_path / "cut")
    other = ("learn", "mine.toml", "--iterations", 3, "--out", "cut")
    refused(fedunfold(*other), "arguments.--iterations was 4 and is 3", "--overwrite", "another --out")
    refused(fedunfold(*other, "--overwrite", "--resume"), "arguments.--iterations was 4 and is 3")
    refused(fedunfold("run", "mine.toml", "--out", "cut"), "command was learn and is run")
    two_sites(lr=0.2)
    refused(fedunfold(*LEARN, "--out", "cut"), "environment.lr was 0.1 and is 0.2")
    two_sites(y_a=[0, 1, 1, 1, 0, 1, 0, 1, 0])
    refused(fedunfold(*LEARN, "--out", "cut"), "data was")
    assert content(tmp_path / "cut") == before
    succeeded(fedunfold(*other, "--overwrite"))
    assert len(LearnedWeights.load(tmp_path / "cut" / "weights.safetensors").losses) == 3


def test_two_processes_do_not_write_to_one_folder(
    fedunfold: Command, crash: Callable[..., None], tmp_path: Path
) -> None:
    crash(*LEARN, iterations=2)
    with FolderLock(tmp_path / "runs" / "learn-two-sites"):
        refused(fedunfold(*LEARN, "--out", "runs/learn-two-sites"), "another process is writing to")
        assert "learn-two-sites-2/" in succeeded(fedunfold(*LEARN)).out, "it is passed by"
    assert "unfinished run in runs/learn-two-sites\n" in succeeded(fedunfold(*LEARN)).err


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock")
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from typing import Any
from fedunfold.io.atomic import FolderLock
lock = FolderLock(Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    FolderLock(tmp_path).release()
    assert not [name for name in os.listdir(tmp_path) if name not in ("data.npz", "mine.toml")]  # noqa: PTH208


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(
    fedunfold: Command, crash: Callable[..., None], tmp_path: Path
) -> None:
    succeeded(fedunfold(*LEARN, "--out", "whole"))
    crash(*LEARN, "--out", "cut", iterations=3)
    file = tmp_path / "cut" / "unfinished" / "learning.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    went_on = succeeded(fedunfold(*LEARN, "--out", "cut"))
    assert "learning.safetensors is damaged; resuming from the one before it" in went_on.err
    assert "resuming from outer iteration 2 of 4" in went_on.err
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_after_ctrl_c_the_same_command_goes_on(
    fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no checkpoint was due yet."""
    monkeypatch.setattr("fedunfold.io.checkpoint.CHECKPOINT_SECONDS", 1000.0)
    report = CallbackList.on_outer_step

    def learning(self: CallbackList, name: str, so_far: LearnedWeights, total: int) -> None:
        report(self, name, so_far, total)
        if len(so_far.losses) == 2:
            raise KeyboardInterrupt

    for command in (LEARN, (*COMPARE, "--iterations", 3)):
        whole, cut = (*command, "--out", f"{command[0]}-whole"), (*command, "--out", f"{command[0]}-cut")
        succeeded(fedunfold(*whole))
        with monkeypatch.context() as patched:
            patched.setattr(CallbackList, "on_outer_step", learning)
            assert fedunfold(*cut).code == 130
        assert "resuming from outer iteration 2 of" in succeeded(fedunfold(*cut)).err
        assert numbers(tmp_path / str(cut[-1])) == numbers(tmp_path / str(whole[-1]))


def test_ctrl_c_in_a_run_keeps_its_rounds(fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedunfold.training import loop

    after = loop._next_round

    def interrupted(*args: Any) -> object:
        if args[-1] == 2:
            raise KeyboardInterrupt
        return after(*args)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_next_round", interrupted)
        stopped = fedunfold("run", "mine.toml", "--out", "cut")
    assert (stopped.code, stopped.err) == (130, "stopped after 2 of 3 rounds; the same command resumes from them.\n")
    assert "resuming from round 2 of 3" in succeeded(fedunfold("run", "mine.toml", "--out", "cut")).err
    succeeded(fedunfold("run", "mine.toml", "--out", "whole"))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_what_diverged_is_not_kept(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    two_sites(lr=1e38)
    refused(fedunfold(*LEARN, "--out", "cut"), "learning rate")
    two_sites()
    succeeded(fedunfold(*LEARN, "--out", "cut"))


def test_threads_are_recorded(fedunfold: Command, tmp_path: Path) -> None:
    succeeded(fedunfold(*LEARN, "--out", "two", "--threads", 2))
    succeeded(fedunfold(*LEARN, "--out", "own"))
    recorded = [json.loads((tmp_path / name / "settings.json").read_text())["threads"] for name in ("two", "own")]
    assert recorded == [2, 1]
    assert numbers(tmp_path / "two") == numbers(tmp_path / "own"), "small steps take one whatever is asked for"


def test_the_comparison_is_shown_whole(fedunfold: Command, crash: Callable[..., None], tmp_path: Path) -> None:
    crash(*COMPARE, "--out", "cut", method="fednova")
    shown = succeeded(fedunfold(*COMPARE, "--out", "cut", "--format", "json")).json
    assert [method["method"] for method in shown["methods"]] == ["duw-fedavg", "fednova"]
    assert set(shown) == {"verdict", "warnings", *Comparison("x", 0).as_json(), "folder"}

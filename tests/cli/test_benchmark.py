"""`fedunfold benchmark`: end to end, stopped and resumed, and what cannot be read in one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command

SUITE = """
name = "mine"
description = "Two methods."
trials = 2
tuning_trials = 1
methods = ["fedavg", "fedadam"]

[contenders.fedavg]
grid = ["server=sgd:lr=1", "server=sgd:lr=2"]

[contenders.fedadam]
grid = ["server=adam:lr=0.01", "server=adam:lr=0.1"]
default = "server=adam:lr=0.01"

[[environments]]
environment = "digits-label-skew"
notes = "Small."

[environments.changes]
rounds = 3
"""
RUNS = 2 * 2 + 2 * 2 + 2 * 2
"""At most: two settings of two methods, then twice the default and the chosen one of each."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(SUITE)
    return file


def refused(outcome: Any, *words: str) -> None:
    """One sentence, and exit code 2."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, outcome.err
    for word in words:
        assert word in outcome.err


def test_a_suite_of_ones_own_end_to_end(fedunfold: Command, suite: Path) -> None:
    ended = fedunfold("benchmark", suite, "--out", "out", "--processes", 1, "--format", "json")
    assert ended.code == 0, ended.err
    assert ended.json["page"] == "out/README.md" and 8 <= ended.json["computed"] <= RUNS
    for file in ("README.md", "results.json", "ranks-chosen.png", "ranks-default.png", "curves.png"):
        assert Path("out", file).stat().st_size > 500
    found = json.loads(Path("out/results.json").read_text())
    methods = found["environments"]["digits-label-skew"]["methods"]
    assert list(methods) == ["fedavg", "fedadam"]
    assert all(len(methods[name][kind]["curve"]) == 3 for name in methods for kind in ("chosen", "default"))
    page = Path("out/README.md").read_text()
    for title in ("Mean ranks", "Final score", "Gain over fedavg", "Wins, ties, losses", "How fast", "Fairness"):
        assert title in page
    assert "Small." in page
    again = fedunfold("benchmark", suite, "--out", "out", "--format", "json")
    assert again.json["computed"] == 0


def test_it_is_repeated_from_its_folder(fedunfold: Command, suite: Path) -> None:
    assert fedunfold("benchmark", suite, "--out", "out", "--trials", 1, "--processes", 1).code == 0
    again = fedunfold("repeat", "out", "--out", "again", "--format", "json")
    assert again.code == 0, again.err
    assert again.json["different"] == [] and again.json["same"]
    assert Path("again/results.json").read_bytes() == Path("out/results.json").read_bytes()


def test_without_a_terminal_lines_say_how_far_it_is(
    fedunfold: Command, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedunfold.cli.benchmark.REPORT_SECONDS", 0.0)
    ended = fedunfold("benchmark", suite, "--out", "out", "--processes", 1)
    assert ended.code == 0
    said = ended.err.splitlines()
    assert re.fullmatch(r"choosing settings: \d+ % done, about \d+ min left; now digits-label-skew: fedavg .*", said[0])
    assert re.match(r"trials: 100 % done, about 0 min left", said[-1])


def test_the_page_is_made_again_from_the_records_alone(
    fedunfold: Command, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fedunfold("benchmark", suite, "--out", "out", "--trials", 1, "--processes", 1).code == 0
    files = [Path("out", name) for name in ("README.md", "results.json")]
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    monkeypatch.setattr("fedunfold.studies.benchmark.runs.run_rounds", None)
    assert fedunfold("benchmark", suite, "--out", "out", "--page").code == 0
    assert [file.read_bytes() for file in files] == before


def test_stopped_at_any_run_it_goes_on_to_the_same_bytes(
    fedunfold: Command, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedunfold.studies.benchmark.records import RunRecords

    assert fedunfold("benchmark", suite, "--out", "whole", "--processes", 1).code == 0
    save, left = RunRecords.save, 0

    def stops(self: RunRecords, record: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        save(self, record)

    monkeypatch.setattr(RunRecords, "save", stops)
    codes = []
    for left in (1, 3, 2, 100):  # noqa: B007
        stopped = fedunfold("benchmark", suite, "--out", "cut", "--processes", 1)
        codes.append(stopped.code)
        if stopped.code:
            assert (stopped.out, stopped.err.count("\n")) == ("", 1)
            assert stopped.err.startswith("stopped; the same command resumes from the records in cut")
    assert codes == [130, 130, 130, 0]
    assert Path("cut/results.json").read_bytes() == Path("whole/results.json").read_bytes()


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_in_several_processes_to_the_same_bytes(
    fedunfold: Command, suite: Path, tmp_path: Path
) -> None:
    """SIGKILL when the first record of each phase is there; what is never killed is made in this process."""
    assert fedunfold("benchmark", suite, "--out", "whole", "--processes", 1).code == 0
    program = [sys.executable, "-m", "fedunfold", "benchmark", str(suite), "--out", "cut", "--processes", "2"]
    for awaited in ("tuning-0.json", "trial-*.json"):
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if list(Path("cut").glob(f"records/*/*/*/{awaited}")):
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
    ended = fedunfold("benchmark", suite, "--out", "cut", "--processes", 2, "--format", "json")
    assert ended.code == 0, ended.err
    assert ended.json["computed"] < RUNS
    assert Path("cut/results.json").read_bytes() == Path("whole/results.json").read_bytes()


def test_ctrl_c_at_the_terminal_is_one_line(suite: Path, tmp_path: Path) -> None:
    """The terminal sends it to the whole group of processes."""
    program = [sys.executable, "-m", "fedunfold", "benchmark", str(suite), "--out", "cut", "--processes", "2"]
    process = subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "cut" / "records" / "suite.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("stopped; the same command resumes") and err.count("\n") == 1


def test_names_that_nobody_has(fedunfold: Command, suite: Path) -> None:
    refused(fedunfold("benchmark", "papers"), "unknown suite 'papers'", "did you mean 'paper'?")
    refused(fedunfold("benchmark", suite, "--methods", "fedavg,fedfoo"), "unknown method 'fedfoo'")
    refused(fedunfold("benchmark", suite, "--only", "mnist-9"), "no environment 'mnist-9'", "digits-label-skew")
    refused(fedunfold("benchmark", suite, "--page", "--out", "new"), "new holds no records", "--page")
    refused(fedunfold("benchmark", suite, "--resume", "--out", "new"), "new holds no records", "--resume")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", ["mine.toml", "is not valid TOML"]),
        ('name = "x"', ["field environments: is missing"]),
        ('name = "x"\nenvironments = []', ["field environments"]),
        ('name = "x"\n[[environments]]\nenvironmet = "mnist-1"', ["environments.0.environment: is missing"]),
        ('name = "x"\ntrails = 3\n[[environments]]\nenvironment = "mnist-1"', ["trails: is not a known field"]),
        ('name = "x"\ntrials = 0\n[[environments]]\nenvironment = "mnist-1"', ["trials: must be at least 1"]),
        ('name = "x"\n[[environments]]\nenvironment = "mnist-9"', ["unknown environment 'mnist-9'"]),
        ('name = "x"\n[[environments]]\nenvironment = "gone.toml"', ["gone.toml", "does not exist"]),
        (SUITE.replace("rounds = 3", "rounds = 0"), ["field rounds: must be at least 1"]),
        (SUITE.replace("rounds = 3", "turns = 3"), ["environments.0.changes: turns is no field of an environment"]),
        (SUITE.replace('"fedadam"]', '"fedadamm"]'), ["unknown method 'fedadamm'", "did you mean"]),
        (SUITE.replace("sgd:lr=2", "sdg:lr=2"), ["method fedavg: unknown server optimiser 'sdg'"]),
        (SUITE.replace("server=sgd:lr=2", "serve=sgd:lr=2"), ["cannot read the setting 'serve=sgd:lr=2'"]),
        (SUITE.replace('"server=sgd:lr=2"', ", ".join(['"server=sgd:lr=2"'] * 5)), ["contenders.fedavg.grid"]),
        (SUITE + '[[environments]]\nenvironment = "digits-label-skew"', ["two environments called digits-label-skew"]),
        ('without = ["fedavg"]\n' + SUITE, ["field reason"]),
    ],
)
def test_a_broken_suite_is_one_sentence(fedunfold: Command, suite: Path, text: str, words: list[str]) -> None:
    suite.write_text(text)
    refused(fedunfold("benchmark", suite, "--out", "out"), *words)
    assert not Path("out").exists()

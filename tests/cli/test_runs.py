"""`fedunfold runs`: what a newcomer types about the runs there are."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedunfold.io.atomic import FolderLock
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused


@pytest.fixture
def two_runs(fedunfold: Command, two_sites: Callable[..., Path]) -> list[str]:
    env = two_sites()
    assert fedunfold("learn", env, "--iterations", 2, "--out", "runs/first").code == 0
    assert fedunfold("compare", env, "--methods", "fedavg,fednova", "--trials", 2, "--out", "runs/second").code == 0
    return ["first", "second"]


def test_list(fedunfold: Command, two_runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "settings.json").write_text('{"command": "\\u001b[31m", "files": ["[red]x"]}')
    shown = fedunfold("runs", "list")
    assert shown.code == 0
    for word in (
        "first",
        "second",
        "two-sites",
        "fednova",
        "finished",
        "damaged",
        "broken: damaged, [red]x is missing.",
    ):
        assert word in shown.out
    assert "\x1b" not in shown.out
    listed = {run["name"]: run for run in fedunfold("runs", "list", "--format", "json").json}
    assert [listed[name]["state"] for name in ("broken", "first", "second")] == ["damaged", "finished", "finished"]
    result = json.loads((tmp_path / "runs" / "second" / "result.json").read_text())["methods"]
    assert [row["accuracy_mean"] for row in listed["second"]["results"]] == [row["accuracy_mean"] for row in result]
    assert listed["first"]["results"][0]["iteration"] == 1
    assert listed["second"]["methods"] == ["fedavg", "fednova"]


def test_show(fedunfold: Command, two_runs: list[str], tmp_path: Path) -> None:
    settings = json.loads((tmp_path / "runs" / "first" / "settings.json").read_text())
    assert fedunfold("runs", "show", "first", "--format", "json").json["settings"] == settings
    shown = fedunfold("runs", "show", "runs/second").out
    assert "two-sites" in shown and "accuracy mean" in shown and "runs/second: finished" in shown


def test_compare(fedunfold: Command, two_runs: list[str]) -> None:
    found = fedunfold("runs", "compare", *two_runs, "--format", "json").json
    assert found["settings"]["command"] == ["learn", "compare"]
    assert "seed" not in found["settings"]
    assert found["results"]["learned: outer loss"][1] is None
    assert "differing setting" in fedunfold("runs", "compare", *two_runs).out
    refused(fedunfold("runs", "compare", "first", "first"), "two runs")


class Terminal(io.StringIO):
    """Typed lines; their end is what Ctrl-D comes to."""

    def isatty(self) -> bool:
        return True


def test_rm_asks(fedunfold: Command, two_runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "first"
    refused(fedunfold("runs", "rm", "first"), "--yes")
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        stopped = fedunfold("runs", "rm", "first")
        assert stopped.code == 130
        assert stopped.err.endswith("stopped; nothing was deleted.\n")
        assert folder.is_dir()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert fedunfold("runs", "rm", "first").code == 0
    assert not folder.exists()


def test_rm_leaves_what_is_not_the_runs(fedunfold: Command, two_runs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    (folder / "notes.md").write_text("mine")
    deleted = fedunfold("runs", "rm", *two_runs, "first", "--yes", "--format", "json").json
    assert [(run["name"], run["left"]) for run in deleted] == [("first", ["notes.md"]), ("second", [])]
    assert [file.name for file in folder.iterdir()] == ["notes.md"]
    refused(fedunfold("runs", "rm", "first", "--yes"), "runs/first is not a run folder")


def test_a_run_that_is_still_written_is_not_deleted(fedunfold: Command, two_runs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / two_runs[1]
    before = sorted((tmp_path / "runs").rglob("*"))
    with FolderLock(folder):
        refused(fedunfold("runs", "rm", *two_runs, "--yes"), "runs/second", "still being written")
    assert sorted((tmp_path / "runs").rglob("*")) == before, "nor are the others"


def test_one_wrong_name_deletes_nothing(fedunfold: Command, two_runs: list[str], tmp_path: Path) -> None:
    refused(fedunfold("runs", "rm", "first", "secund", "--yes"), "did you mean 'second'?")
    assert (tmp_path / "runs" / "first").is_dir()


def test_no_folder_and_an_empty_one(fedunfold: Command, tmp_path: Path) -> None:
    refused(fedunfold("runs", "list"), "runs", "--in")
    (tmp_path / "none").mkdir()
    assert "holds no runs" in fedunfold("runs", "list", "--in", "none").out
    refused(fedunfold("runs", "show", "demo", "--in", "none"), "none holds none")

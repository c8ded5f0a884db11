"""`fedunfold repeat`: the same bytes, or a word on what differs."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import CallbackList
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused

Federation = Callable[..., Path]


def change_settings(folder: Path, **changes: Any) -> None:
    file = folder / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("command", "compared"),
    [
        (("learn", "below/mine.toml", "--iterations", 2, "--seed", 3, "--rounds", 2), "weights.safetensors"),
        (("run", "below/mine.toml", "--local", "prox:mu=0.1", "--absent", "drop"), "model.safetensors"),
        (("compare", "below/mine.toml", "--methods", "fedavg,duw-fedavg", "--trials", 1, "--iterations", 1), "result"),
    ],
    ids=["learn", "run", "compare"],
)
def test_the_same_comes_out_again_from_anywhere(
    fedunfold: Command,
    two_sites: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
    compared: str,
) -> None:
    two_sites()
    (tmp_path / "below").mkdir()
    for name in ("data.npz", "mine.toml"):
        (tmp_path / name).rename(tmp_path / "below" / name)
    assert fedunfold(*command, "--out", "deep/down").code == 0
    monkeypatch.chdir(tmp_path / "below")
    repeated = fedunfold("repeat", "../deep/down")
    assert repeated.code == 0, repeated.err
    assert repeated.out.startswith("same: ")
    assert compared in repeated.out
    assert repeated.out.endswith("; ../deep/down again in runs/repeat-down\n")
    assert fedunfold("repeat", "../deep/down", "--format", "json").json == {
        "folder": "runs/repeat-down-2",
        "same": True,
        "different": [],
        "elsewhere": {},
    }


def test_a_difference_is_told(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    fedunfold("learn", two_sites(), "--iterations", 2, "--out", "one")
    (tmp_path / "one" / "metrics.jsonl").write_text("another number\n")
    (tmp_path / "one" / "federation.json").write_text("{}")
    (tmp_path / "one" / "weights.png").write_text("other fonts")
    settings = json.loads((tmp_path / "one" / "settings.json").read_text())
    change_settings(tmp_path / "one", machine=settings["machine"] | {"torch": "1.0", "cores": 99})
    repeated = fedunfold("repeat", "one", "--out", "two")
    assert repeated.code == 1
    told, note = repeated.out.splitlines()
    assert told == "different: metrics.jsonl, federation.json; one again in two"
    assert note.startswith("note: torch was 1.0 and is ")


def test_weights_from_a_file_are_found_and_checked(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    fedunfold("learn", env, "--iterations", 1, "--out", "learned")
    weights = "learned/weights.safetensors"
    assert fedunfold("run", env, "--weights", weights, "--out", "ran").code == 0
    assert fedunfold("compare", env, "--methods", f"fedavg, {weights}", "--trials", 1, "--out", "compared").code == 0
    for run in ("ran", "compared"):
        assert fedunfold("repeat", run).code == 0
    fedunfold("learn", env, "--iterations", 2, "--out", "learned", "--overwrite")
    refused(fedunfold("repeat", "ran"), "weights.safetensors is not the file that the run in ran used")
    (tmp_path / weights).unlink()
    refused(fedunfold("repeat", "ran"), "weights.safetensors", "No such file")


def test_what_cannot_be_repeated(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    refused(fedunfold("repeat", "nowhere"), "there is no folder nowhere")
    fedunfold("run", two_sites(), "--out", "ran")
    refused(fedunfold("repeat", "ran", "--out", "ran"), "ran already holds a run", "another --out")
    (tmp_path / "ran" / "unfinished").mkdir()
    (tmp_path / "ran" / "unfinished" / "run_spec.json").write_text("{}")
    refused(fedunfold("repeat", "ran"), "has not ended")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"arguments": None}, "field arguments"),
        ({"arguments": {"--device": {}}}, "field arguments.--device"),
        ({"files": [1]}, "field files.0"),
        ({"inputs": [{}]}, "field inputs.0"),
        ({"inputs": [1]}, "field inputs.0"),
        ({"command": "runs"}, "field command"),
        ({"threads": 0}, "field threads"),
    ],
    ids=str,
)
def test_damaged_settings_are_refused_by_their_field(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    fedunfold("run", two_sites(), "--out", "ran")
    change_settings(tmp_path / "ran", **changes)
    refused(fedunfold("repeat", "ran"), "ran/settings.json", field, "make the run again")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
def test_an_input_that_is_a_pipe_is_refused(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    fedunfold("run", two_sites(), "--out", "ran")
    os.mkfifo(tmp_path / "pipe")
    change_settings(tmp_path / "ran", inputs=[{"given": "pipe", "path": "../pipe", "sha256": "0"}])
    refused(fedunfold("repeat", "ran"), "pipe is not a plain file")


def test_a_listed_file_that_is_nowhere_is_a_difference(
    fedunfold: Command, two_sites: Federation, tmp_path: Path
) -> None:
    fedunfold("run", two_sites(), "--out", "ran")
    change_settings(tmp_path / "ran", files=["metrics.jsonl", "lost.json", "x" * 300])
    assert fedunfold("repeat", "ran", "--format", "json").json["different"] == ["lost.json", "x" * 300]


@pytest.mark.parametrize("out", [(), ("--out", "again")], ids=["named by itself", "--out"])
def test_after_ctrl_c_the_same_repetition_goes_on(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: tuple[str, ...]
) -> None:
    fedunfold("learn", two_sites(), "--iterations", 4, "--out", "ran")
    report = CallbackList.on_outer_step

    def interrupted(self: CallbackList, name: str, so_far: LearnedWeights, total: int) -> None:
        report(self, name, so_far, total)
        if len(so_far.losses) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CallbackList, "on_outer_step", interrupted)
        assert fedunfold("repeat", "ran", *out).code == 130
    folder = out[1] if out else "runs/repeat-ran"
    assert (tmp_path / folder / "settings.json").exists()
    repeated = fedunfold("repeat", "ran", *out)
    assert "resuming from outer iteration 2 of 4" in repeated.err
    assert (repeated.code, repeated.out.endswith(f"; ran again in {folder}\n")) == (0, True)


def test_a_reproduction_in_one_process_and_in_two(fedunfold: Command, tmp_path: Path) -> None:
    only = [part for name in ("digits-flaky", "fedavg", "duw-fedavg") for part in ("--only", name)]
    command = ("reproduce", "digits", "--trials", 1, "--jobs", 2, "--out", "two", *only)
    assert fedunfold(*command).code == 0
    settings = json.loads((tmp_path / "two" / "settings.json").read_text())
    assert settings["threads"] == 1
    repeated = fedunfold("repeat", "two", "--out", "again")
    assert repeated.code == 0, repeated.err
    assert "records/digits-flaky/duw-fedavg/weights.safetensors" in repeated.out
    alone = fedunfold(*command, "--jobs", 1, "--out", "one")
    assert alone.code == 0
    for name in settings["files"]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    for damaged in ("{cut", "[]"):
        (tmp_path / "two" / "made.json").write_text(damaged)
        refused(fedunfold(*command), "two/made.json", "delete it")

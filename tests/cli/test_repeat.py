"""`fedunfold repeat`: the same bytes, or a word on what differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        (("run", "below/mine.toml", "--update", "prox:mu=0.1", "--absent", "drop"), "model.safetensors"),
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
    settings = json.loads((tmp_path / "one" / "settings.json").read_text())
    change_settings(tmp_path / "one", machine=settings["machine"] | {"torch": "1.0", "cores": 99})
    repeated = fedunfold("repeat", "one", "--out", "two")
    assert repeated.code == 1
    told, note = repeated.out.splitlines()
    assert told == "different: metrics.jsonl; one again in two"
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
    refused(fedunfold("repeat", "nowhere"), "nowhere is not a run folder")
    fedunfold("run", two_sites(), "--out", "ran")
    refused(fedunfold("repeat", "ran", "--out", "ran"), "ran already holds a run", "another --out")
    change_settings(tmp_path / "ran", arguments=None)
    refused(fedunfold("repeat", "ran"), "settings.json has no usable 'arguments'")
    (tmp_path / "ran" / "unfinished").mkdir()
    (tmp_path / "ran" / "unfinished" / "asked.json").write_text("{}")
    refused(fedunfold("repeat", "ran"), "has not ended")


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

"""The folder that a command leaves: where it is, what is in it, and what a second run does to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedunfold as fu
from fedunfold import api
from fedunfold.runs.schema import FederationRecord
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused

Federation = Callable[..., Path]
RUN_FILES = {
    "card.md",
    *("settings.json", "environment.toml", "federation.json"),
    *("metrics.jsonl", "client_scores.jsonl", "model.safetensors", "model.json"),
}


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_learning_without_a_folder_gets_a_new_one(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    for number, folder in enumerate(("learn-two-sites", "learn-two-sites-2", "learn-two-sites-3")):
        learned = fedunfold("learn", env, "--iterations", 1, "--seed", number, "--format", "json").json
        assert learned["folder"] == f"runs/{folder}"
        assert learned["file"] == f"runs/{folder}/weights.safetensors"
        settings = json.loads((tmp_path / "runs" / folder / "settings.json").read_text())
        assert (settings["seed"], settings["kernel"]) == (number, "MLPKernel")
    assert "runs/learn-two-sites-4/" in fedunfold("learn", env, "--iterations", 1).out


def test_comparing_without_a_folder_gets_a_new_one(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    command = ("compare", two_sites(), "--methods", "fedavg", "--trials", 1)
    assert fedunfold(*command).out.endswith("records and figures are in runs/compare-two-sites\n")
    keys = {"verdict", "warnings", "environment", "trials", "metric", "methods", "folder"}
    assert set(fedunfold(*command, "--format", "json").json) == keys
    assert names(tmp_path / "runs") == {"compare-two-sites", "compare-two-sites-2"}
    fedunfold(*command, "--overwrite", "--seed", 5)
    assert names(tmp_path / "runs") == {"compare-two-sites", "compare-two-sites-2"}
    assert json.loads((tmp_path / "runs" / "compare-two-sites" / "settings.json").read_text())["seed"] == 5


def test_a_name_that_is_no_file_name(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    env.write_text(env.read_text().replace('"two-sites"', '"two/../sites"'))
    assert fedunfold("learn", env, "--iterations", 1).code == 0
    assert names(tmp_path / "runs") == {"learn-two-..-sites"}


def test_running_is_saved_on_request_only(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    assert fedunfold("run", two_sites()).code == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_leaves_the_trained_model(fedunfold: Command, two_sites: Federation, tmp_path: Path, dtype: str) -> None:
    env = two_sites()
    ran = fedunfold("run", env, "--method", "fednova", "--dtype", dtype, "--out", "ran")
    assert ran.out.endswith("records and the trained model are in ran\n")
    assert names(tmp_path / "ran") == RUN_FILES
    result = fu.run(env, "fednova", dtype=getattr(torch, dtype))
    expected = fu.trained_module(env, result).state_dict()
    saved = load_file(tmp_path / "ran" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize("command", ["learn", "run", "compare"])
def test_a_folder_with_a_run_is_left_alone(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, command: str
) -> None:
    env = two_sites()
    assert fedunfold("compare", env, "--methods", "fedavg", "--trials", 1, "--out", "kept").code == 0
    before = content(tmp_path / "kept")
    refused(fedunfold(command, env, "--out", "kept"), "kept", "--overwrite")
    assert content(tmp_path / "kept") == before


def test_overwriting_removes_the_other_run_and_nothing_else(
    fedunfold: Command, two_sites: Federation, tmp_path: Path
) -> None:
    env, folder = two_sites(), tmp_path / "kept"
    fedunfold("compare", env, "--methods", "duw-fedavg", "--trials", 1, "--iterations", 1, "--out", folder)
    (folder / "mine.safetensors").write_text("my own")
    (folder / "notes").mkdir()
    assert fedunfold("run", env, "--out", folder, "--overwrite").code == 0
    assert names(folder) == {"mine.safetensors", "notes", *RUN_FILES}


@pytest.mark.parametrize("listed", [["../outside", "notes/inside", "/etc/nothing", 3], "notes", {}])
def test_overwriting_never_leaves_the_folder(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, listed: Any
) -> None:
    env, folder = two_sites(), tmp_path / "kept"
    (folder / "notes").mkdir(parents=True)
    for file in (tmp_path / "outside", folder / "notes" / "inside"):
        file.touch()
    (folder / "settings.json").write_text(json.dumps({"files": listed}))
    assert fedunfold("run", env, "--out", folder, "--overwrite").code == 0
    assert (tmp_path / "outside").exists()
    assert (folder / "notes" / "inside").exists()


def test_a_failure_leaves_the_run_that_was_there(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    fedunfold("learn", two_sites(), "--iterations", 1, "--out", "kept")
    before = content(tmp_path / "kept")
    for command in ("learn", "run", "compare"):
        refused(fedunfold(command, two_sites(lr=1e38), "--out", "kept", "--overwrite"), "learning rate")
    assert content(tmp_path / "kept") == before


def test_unreadable_settings_are_a_run_all_the_same(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "settings.json").write_text("{cut")
    refused(fedunfold("run", two_sites(), "--out", "kept"), "--overwrite")
    assert fedunfold("run", two_sites(), "--out", "kept", "--overwrite").code == 0


def test_the_demo_replaces_itself_and_nothing_else(
    fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = api.compare("digits-label-skew", ["fedavg"], trials=1)
    monkeypatch.setattr(api, "compare", lambda *_, **__: quick)
    for out in ((), (), ("--out", "runs/demo"), ("--out", "other")):
        assert fedunfold("demo", *out).code == 0
    shown = fedunfold("demo", "--format", "json").json
    assert shown.pop("verdict")["method"] == "fedavg"
    assert shown.pop("warnings") == []
    assert shown == quick.as_json() | {"folder": "runs/demo"}
    assert names(tmp_path / "runs") == {"demo"}
    refused(fedunfold("demo", "--out", "other"), "other", "--overwrite")
    assert fedunfold("demo", "--out", "other", "--overwrite").code == 0


def test_the_environment_in_the_folder_finds_its_data(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sites()
    (tmp_path / "below").mkdir()
    for name in ("data.npz", "mine.toml"):
        (tmp_path / name).rename(tmp_path / "below" / name)
    for out in ((), ("--out", "deep/down/here")):
        assert fedunfold("learn", "below/mine.toml", "--iterations", 1, *out).code == 0
    for folder in ("runs/learn-two-sites", "deep/down/here"):
        monkeypatch.chdir("/")
        checked = fedunfold("env", "check", tmp_path / folder / "environment.toml", "--format", "json")
        assert checked.code == 0, checked.err
        assert [client["samples"] for client in checked.json["clients"]] == [9, 6]


def test_a_folder_says_what_its_federation_was(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites(participation_probability=0.5)
    for command in ("learn", "run"):
        fedunfold(command, env, "--out", command, *(("--iterations", 1) if command == "learn" else ()))
        record = json.loads((tmp_path / command / "federation.json").read_text())
        assert record["clients"] == [
            {"key": "a", "samples": 9, "label_counts": [5, 4, 0], "epochs": 1, "participation_probability": 1.0}
            | {"held_out": 0},
            {"key": "b", "samples": 6, "label_counts": [2, 2, 2], "epochs": 2, "participation_probability": 0.5}
            | {"held_out": 0},
        ]
        kept = FederationRecord.of(fu.environment(env).replace(holdout=1 / 3)).clients
        assert [(client.samples, client.held_out) for client in kept] == [(6, 3), (4, 2)]
        found = fu.environment(env)
        assert record["digest"] == found.digest(found.load())
        assert (record["classes"], record["test_samples"], record["rounds"]) == (3, 6, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_folder_says_how_each_client_is_served(
    fedunfold: Command, two_sites: Federation, tmp_path: Path, site_data: dict[str, Any], dtype: str
) -> None:
    env = two_sites()
    fedunfold("compare", env, "--methods", "fedavg,fednova", "--trials", 2, "--out", "kept", "--dtype", dtype)
    lines = [json.loads(line) for line in (tmp_path / "kept" / "client_scores.jsonl").read_text().splitlines()]
    assert [(line["method"], line["trial"]) for line in lines] == [
        *(("fedavg", 0), ("fedavg", 1)),
        *(("fednova", 0), ("fednova", 1)),
    ]
    result = fu.run(env, "fednova", trial=1, dtype=getattr(torch, dtype))
    model = fu.trained_module(env, result)
    for key, found in zip("ab", lines[-1]["client_scores"], strict=True):
        predicted = model(torch.from_numpy(site_data[f"x_{key}"])).argmax(1).numpy()
        assert found == pytest.approx(100 * (predicted == site_data[f"y_{key}"]).mean())

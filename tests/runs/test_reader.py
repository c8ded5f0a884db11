"""Folders that are no run, damaged, old or of another version."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedunfold.core.errors import InputError
from fedunfold.runs.reader import read_runs
from tests.support.run_records import write_run


def refused(folder: Path, *mentioned: str) -> None:
    with pytest.raises(InputError) as caught:
        read_runs([folder])
    message = str(caught.value)
    assert "\n" not in message
    for word in (*mentioned, folder.name):
        assert word in message, message


def test_a_whole_run(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "kept")])
    assert (run.label, run.clients) == ("kept", ("north", "south"))
    fedavg, duw = run.methods
    assert fedavg.scores.tolist() == [[40, 41], [40, 41]]
    assert np.array_equal(duw.class_accuracy, [[90, np.nan, 30]] * 2, equal_nan=True)
    assert duw.client_scores.tolist() == [[80, 50]] * 2
    assert duw.weights.tolist() == [[0.4, 0.6]] * 2
    assert list(run.learned) == ["duw"]


def test_weights_are_found_by_their_methods_name(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "kept", methods=("fedavg", "duw"))])
    assert list(run.learned) == ["duw"] == [run.methods[1].name]


@pytest.mark.parametrize("file", ["federation.json", "metrics.jsonl", "client_scores.jsonl", "duw.safetensors"])
def test_files_that_are_missing(tmp_path: Path, file: str) -> None:
    folder = write_run(tmp_path / "kept")
    (folder / file).unlink()
    refused(folder, file)


def test_what_a_later_version_of_the_same_line_adds_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept", more={"new": 1})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line | {"screened": [1]}) + "\n" for line in lines))
    assert len(read_runs([folder])[0].methods) == 2


def test_no_folder_no_run_and_twice(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "not a run folder", "settings.json")
    folder = write_run(tmp_path / "kept")
    with pytest.raises(InputError, match="named twice"):
        read_runs([folder, folder])


def test_runs_with_the_same_folder_name_are_told_apart(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert [run.label for run in runs] == ["run", "run (2)"]


@pytest.mark.parametrize(("version", "words"), [("99.0.0", ("99.0.0", "that one")), ("soon", ("no version",))])
def test_folders_of_another_version(tmp_path: Path, version: str, words: tuple[str, ...]) -> None:
    refused(write_run(tmp_path / "kept", version=version), *words)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("settings.json", b"{cut", ("settings.json",)),
        ("settings.json", b"[]", ("settings.json",)),
        ("settings.json", b"\xff\xfe", ("UTF-8",)),
        ("federation.json", b'{"clients": []}', ("federation.json",)),
        ("metrics.jsonl", b'{"method": "a"}\n', ("metrics.jsonl, line 1", "missing")),
        ("client_scores.jsonl", b"nonsense\n", ("client_scores.jsonl, line 1",)),
        ("duw.safetensors", b"nonsense", ("duw.safetensors",)),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, content: bytes, words: tuple[str, ...]) -> None:
    folder = write_run(tmp_path / "kept")
    (folder / file).write_bytes(content)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("accuracy", float("nan"), "accuracy"),
        ("accuracy", "high", "accuracy"),
        ("round", 7, "out of turn"),
        ("trial", 5, "out of turn"),
        ("weights", [1.0], "do not fit together"),
        ("method", None, "method"),
    ],
)
def test_lines_that_cannot_be(tmp_path: Path, field: str, value: object, word: str) -> None:
    folder = write_run(tmp_path / "kept")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1] = lines[1] | {field: value}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(folder, "metrics.jsonl", word)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("metrics.jsonl", "[0.4, 0.6]", "[0.4, 0.3, 0.3]"),
        ("metrics.jsonl", "[90.0, null, 10.0]", "[90.0, 10.0]"),
        ("client_scores.jsonl", "[80.0, 30.0]", "[80.0]"),
        ("client_scores.jsonl", '"fedavg"', '"fednova"'),
    ],
)
def test_numbers_of_clients_and_classes_that_differ(tmp_path: Path, file: str, before: str, after: str) -> None:
    folder = write_run(tmp_path / "kept")
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    refused(folder, "metrics.jsonl", "'fedavg' do not fit together, or not the federation")


def test_weights_of_other_clients(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept")
    text = (folder / "federation.json").read_text()
    (folder / "federation.json").write_text(text.replace("north", "west"))
    refused(folder, "other clients")


def test_weights_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept")
    (folder / "duw.safetensors").rename(tmp_path / "duw.safetensors")
    settings = json.loads((folder / "settings.json").read_text())
    settings["files"] = ["../duw.safetensors", str(tmp_path / "duw.safetensors")]
    (folder / "settings.json").write_text(json.dumps(settings))
    assert not read_runs([folder])[0].learned


@pytest.mark.parametrize(
    ("file", "limit"),
    [
        ("settings.json", "RECORD_BYTES"),
        ("federation.json", "FEDERATION_BYTES"),
        ("metrics.jsonl", "LINES_BYTES"),
        ("duw.safetensors", "WEIGHTS_BYTES"),
    ],
)
def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, limit: str) -> None:
    monkeypatch.setenv(f"FEDUNFOLD_MAX_{limit}", "0")
    refused(write_run(tmp_path / "kept"), file, "more than the 0 bytes", f"FEDUNFOLD_MAX_{limit}")


def begin(folder: Path) -> None:
    """What a run leaves that has not ended."""
    (folder / "unfinished").mkdir(parents=True)
    (folder / "unfinished" / "run_spec.json").write_text("{}")


def test_runs_that_have_not_ended(tmp_path: Path) -> None:
    begin(tmp_path / "begun")
    refused(tmp_path / "begun", "begun has not ended", "resume it")
    (tmp_path / "followed").mkdir()
    (tmp_path / "followed" / "progress.jsonl").touch()
    refused(tmp_path / "followed", "followed has not ended")
    folder = write_run(tmp_path / "kept")
    assert not read_runs([folder])[0].stopped
    begin(folder)
    assert read_runs([folder])[0].stopped


def test_class_names(tmp_path: Path) -> None:
    assert read_runs([write_run(tmp_path / "none")])[0].classes == ("0", "1", "2")
    named = write_run(tmp_path / "named", class_names=("ill", "ill", ""))
    assert read_runs([named])[0].classes == ("ill", "ill (2)", "2")
    record = json.loads((named / "federation.json").read_text())
    (named / "federation.json").write_text(json.dumps(record | {"class_names": ["ill"]}))
    refused(named, "federation.json", "it names 1 of 3 classes")
    del record["class_names"]
    (named / "federation.json").write_text(json.dumps(record))
    assert read_runs([named])[0].classes == ("0", "1", "2")


def test_who_was_rejected(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, rejected in ((0, {"south": "first"}), (1, {"north": "once"}), (3, {"south": "then"})):
        lines[number]["rejected"] = rejected
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_runs([folder])[0].methods
    assert [(found.client, found.times, found.reason) for found in first.rejected] == [
        ("south", 2, "then"),
        ("north", 1, "once"),
    ]
    assert second.rejected == ()

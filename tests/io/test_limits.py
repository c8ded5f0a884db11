"""Sizes that are a mistake or a lie are refused before anything is allocated, in a line that names them."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import Environment, ModelSpec
from fedunfold.config.model import model_factory
from fedunfold.core.errors import InputError
from fedunfold.data.npz import read_npz
from fedunfold.data.vision.files import METADATA, load_features, read_about
from fedunfold.io import limits
from fedunfold.io.atomic import parse_toml, read_json
from fedunfold.io.checkpoint import Checkpoint, write_record
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.reader import list_files, read_settings
from fedunfold.studies.cases import read_assignment
from fedunfold.studies.records import StudyRecords
from fedunfold.training.state import load_states
from fedunfold.unfolding.state import Progress

LIMITS = [value for value in vars(limits).values() if isinstance(value, limits.Limit)]
FIELDS: dict[str, Any] = {
    "name": "mine",
    "rounds": 3,
    "batch_size": 4,
    "lr": 0.1,
    "data": {"source": "digits"},
    "partition": {"kind": "iid"},
    "clients": [{"key": "a"}],
}
TOML = """
name = "mine"
rounds = 3
batch_size = 4
lr = 0.1
data = {source = "digits"}
partition = {kind = "iid"}
clients = [{key = "a"}]
"""


def refused(call: Callable[[], object], *words: object) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert str(word) in message, message


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 10**9}, ("field rounds", "FEDUNFOLD_MAX_ROUNDS")),
        ({"batch_size": 10**12}, ("field batch_size", "FEDUNFOLD_MAX_BATCH")),
        ({"seed": 2**64}, ("field seed",)),
        ({"clients": [{"key": "a", "count": 10**9}]}, ("clients", "entry 0", "FEDUNFOLD_MAX_CLIENTS")),
        ({"clients": [{"key": "a", "count": 60_000}, {"key": "b", "count": 60_000}]}, ("entry 1", "120000")),
        ({"clients": [{"key": "a", "epochs": 10**9}]}, ("clients.0.epochs", "FEDUNFOLD_MAX_EPOCHS")),
        ({"model": {"hidden": [10**9]}}, ("model.hidden.0", "FEDUNFOLD_MAX_WIDTH")),
        ({"model": {"hidden": [2] * 1000}}, ("model.hidden", "FEDUNFOLD_MAX_LAYERS")),
        ({"name": "two\nlines"}, ("field name", "one line")),
        ({"name": "n" * 300}, ("field name",)),
    ],
)
def test_settings_beyond_belief(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(lambda: Environment(**FIELDS | change), *words)


def test_a_model_too_large_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(hidden=(90_000, 90_000))
    refused(lambda: model_factory(spec, (4,), 3), "model.hidden", "8100810003", "FEDUNFOLD_MAX_PARAMETERS")
    monkeypatch.setenv("FEDUNFOLD_MAX_PARAMETERS", "9000000000")
    model_factory(spec, (4,), 3)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_every_limit_is_raised_by_its_variable(limit: limits.Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(limits, limit.name) is limit, "it is called as its variable is"
    over = limit.default + 1
    assert limit.check(limit.default) == limit.default
    refused(lambda: limit.check(over, "mine: "), "mine: ", over, limit.default, limit.unit, limit.variable)
    monkeypatch.setenv(f"FEDUNFOLD_MAX_{limit.name}", str(over))
    assert limit.check(over) == limit.value == over
    refused(lambda: limit.check(over + 1), over + 1, limit.variable)


def test_a_dotted_name_can_have_more_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ".".join("abcdefghijklmnopqrstu")
    refused(lambda: parse_toml(f"{name} = 1"), "dotted name", "FEDUNFOLD_MAX_NAME_PARTS")
    monkeypatch.setenv("FEDUNFOLD_MAX_NAME_PARTS", "21")
    assert list(parse_toml(f"{name} = 1")) == ["a"]


def test_a_limit_is_raised_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDUNFOLD_MAX_ROUNDS", "200000")
    assert Environment(**FIELDS | {"rounds": 150_000}).rounds == 150_000
    for wrong in ("many", "-1", "1e9", "²", ""):
        monkeypatch.setenv("FEDUNFOLD_MAX_ROUNDS", wrong)
        refused(lambda: Environment(**FIELDS), "FEDUNFOLD_MAX_ROUNDS", "whole number")


# --- text files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seed = 0x" + "f" * 5000, ("field seed",)),
        ("seed = " + "9" * 5000, ("valid TOML",)),
        ("a." * 20_000 + "b = 1", ("dotted name",)),
        ('"a"  .  ' * 20_000 + "b = 1", ("dotted name",)),
        ("[" + "a." * 20_000 + "b]", ("dotted name",)),
        ("other = " + "[" * 20_000, ("valid TOML",)),
        ('"a\\nb" = 1', ("field a\\nb",)),
        ("self = 1", ("field self",)),
        ("# " + "x" * 5 * 2**20, ("FEDUNFOLD_MAX_ENVIRONMENT_BYTES",)),
    ],
)
def test_hostile_environment_files(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"{line}\n{TOML}" if "=" in line or line.startswith("#") else TOML + line)
    refused(lambda: Environment.from_toml(file), "mine.toml", *words)


def test_an_environment_with_many_dots_in_its_words(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('description = "see e.g. the paper ... and, i.e., v1.2.3.4.5.6 of it"\n' + TOML)
    assert Environment.from_toml(file).rounds == 3


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    refused(lambda: Environment.from_toml(tmp_path / "pipe.toml"), "pipe.toml", "plain file")
    refused(lambda: Environment.from_toml(tmp_path / ("x" * 300 + ".toml")), "cannot be read")
    refused(lambda: Environment.from_toml(tmp_path / "a\0b.toml"), "name of a file")
    refused(lambda: LearnedWeights.load(tmp_path / ("x" * 300)), "weights file")
    refused(lambda: read_npz(Path("/dev/zero")), "/dev/zero", "plain file")


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, '{"clients": "' + "x" * 17 * 2**20 + '"}'])
def test_hostile_json(tmp_path: Path, content: str) -> None:
    file = tmp_path / "hostile.json"
    file.write_text(content)
    refused(lambda: read_json(file), "hostile.json")
    refused(lambda: read_assignment(file), "hostile.json")
    (tmp_path / "settings.json").write_text(content)
    refused(lambda: read_settings(tmp_path), "settings.json")
    assert list_files(tmp_path) == [tmp_path / "settings.json"]


def test_an_assignment_of_class_infinity(tmp_path: Path) -> None:
    file = tmp_path / "clients.json"
    file.write_text('{"clients": [[[Infinity, 20]]]}')
    refused(lambda: read_assignment(file), "clients.json", "infinity")


def test_a_record_with_words_for_numbers(tmp_path: Path) -> None:
    from fedunfold.config import environment
    from fedunfold.studies.cases import StudyCase

    case = StudyCase(environment("digits-flaky"))
    file = tmp_path / case.name / "fedavg" / "learning.json"
    write_record(file, {"seconds": "long"})
    refused(lambda: StudyRecords(tmp_path).seconds([case]), "learning.json", "seconds", "delete it")


def test_data_of_a_user_who_is_not_there() -> None:
    env = Environment(**FIELDS | {"data": {"source": "npz", "path": "~nobody-of-that-name/x.npz"}})
    refused(env.load, "data.path", "~nobody-of-that-name")


# --- arrays ---------------------------------------------------------------------------------------------------------


def member(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def npz(path: Path, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", content)
    return path


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(10, 10)", "(0,)", "(-1, -8)"])
def test_an_array_of_another_size_than_its_header_says(tmp_path: Path, shape: str) -> None:
    content = member(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}", bytes(64))
    refused(lambda: read_npz(npz(tmp_path / "x.npz", content), ["x"]), "x in", "x.npz", "cannot be read")


def test_a_small_file_that_unpacks_to_a_huge_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 200 * 2**20
    content = member(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},)}}", bytes(size))
    file = npz(tmp_path / "bomb.npz", content)
    assert file.stat().st_size < 2**20
    refused(lambda: read_npz(file), "bomb.npz", size + 128, "np.savez", "FEDUNFOLD_MAX_UNPACKED_BYTES")
    monkeypatch.setenv("FEDUNFOLD_MAX_UNPACKED_BYTES", str(2**28))
    assert read_npz(file)["x"].nbytes == size


def test_a_directory_that_lies_about_sizes(tmp_path: Path) -> None:
    """10 GB in the zip directory and in the array's header, of which nothing is there."""
    size = 10**10
    file = npz(tmp_path / "lie.npz", member(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},)}}"))
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**32 - 2)
    file.write_bytes(content)
    refused(lambda: read_npz(file), "lie.npz")


def test_other_ways_of_packing_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(10**6))
    refused(lambda: read_npz(npz(tmp_path / "x.npz", content.getvalue(), zipfile.ZIP_LZMA)), "x.npy", "np.savez")


def safetensors(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    return path


@pytest.mark.parametrize("length", [None, 2**63, 2**34])
@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
        {"x": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}},
        {"x": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}},
        {"__metadata__": {"fedunfold": "[" * 100_000}},
    ],
)
def test_hostile_safetensors(tmp_path: Path, header: dict[str, Any], length: int | None) -> None:
    file = safetensors(tmp_path / "x.safetensors", json.dumps(header).encode(), length)
    refused(lambda: LearnedWeights.load(file), "x.safetensors")
    refused(lambda: Progress.load(Checkpoint(file, "learning", {}), (0.9, 0.9)), "x.safetensors")
    refused(lambda: load_states(Checkpoint(file, "run", {}), torch.device("cpu")), "x.safetensors")
    refused(lambda: load_features(file), "x.safetensors")


def test_how_features_were_made_in_a_nest_of_brackets(tmp_path: Path) -> None:
    tensors = {"x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}
    tensors["y"] = {"dtype": "U8", "shape": [1], "data_offsets": [4, 5]}
    texts = {"name": ["a"], "synset": ["a"], "about": "[" * 100_000}
    header = json.dumps({"__metadata__": {METADATA: json.dumps(texts)}, **tensors}).encode()
    file = safetensors(tmp_path / "x.safetensors", header + bytes(5), len(header))
    assert read_about(file) is None


def test_a_header_too_long_to_be_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.HEADER_BYTES.variable, "1000")
    file = safetensors(tmp_path / "x.safetensors", b"{" + b" " * 2000 + b"}")
    refused(lambda: LearnedWeights.load(file), "x.safetensors", "FEDUNFOLD_MAX_HEADER_BYTES")


# --- run folders ----------------------------------------------------------------------------------------------------


def test_replacing_a_run_takes_away_nothing_outside_it(tmp_path: Path) -> None:
    """Links in the folder go, what they lead to stays; names that lead elsewhere are not followed."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (folder / "link").symlink_to(outside / "mine")
    (folder / "folder").symlink_to(outside)
    listed = [
        "link",
        "folder",
        "folder/mine",
        "../outside/mine",
        str(outside / "mine"),
        "..",
        ".",
        "",
        "x" * 5000,
        "a\0b",
        None,
    ]
    (folder / "settings.json").write_text(json.dumps({"files": listed}))
    for file in list_files(folder):
        file.unlink()
    assert (outside / "mine").read_text() == "mine"
    assert sorted(file.name for file in folder.iterdir()) == ["folder"]


def test_a_run_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "settings.json").write_text('{"files": ["../beside", "own"]}')
    for name in ("beside", "real/own", "real/mine"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for file in list_files(tmp_path / "link"):
        file.unlink()
    assert (tmp_path / "beside").exists()
    assert [file.name for file in (tmp_path / "real").iterdir()] == ["mine"]

"""A checkpoint is whole, of this work and of this format, or it is not gone on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedunfold.core.errors import InputError
from fedunfold.io import checkpoint as checkpoint_module
from fedunfold.io.checkpoint import (
    Checkpoint,
    DamagedError,
    embed_checksum,
    first_difference,
    read_record,
    remove_checkpoint,
    verify_checksum,
    write_record,
)

IDENTITY = {"lr": 0.1, "keys": ["a", "b"]}


def checkpoint(folder: Path, **identity: Any) -> Checkpoint:
    return Checkpoint(folder / "kept.safetensors", "learning", IDENTITY | identity)


def save(kept: Checkpoint, value: float) -> None:
    kept.save({"x": torch.tensor([value])}, {"value": value})


def value(tensors: Any, about: Any) -> float:
    assert float(tensors["x"]) == about["value"]
    return float(tensors["x"])


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    assert kept.load(value) is None
    for step in (1.0, 2.0, 3.0):
        save(kept, step)
    assert kept.load(value) == 3
    assert float(load_file(kept.before)["x"]) == 2
    assert {file.name for file in tmp_path.iterdir()} == {"kept.safetensors", "kept-before.safetensors"}
    remove_checkpoint(kept.path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_one_never_takes_the_place_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = checkpoint(tmp_path)
    save(kept, 1)
    save(kept, 2)
    damage(kept.path)
    assert kept.load(value) == 1
    assert "kept.safetensors is damaged; resuming from the one before it" in caplog.text
    save(kept, 1.5)
    damage(kept.path)
    assert kept.load(value) == 1


def test_one_that_was_cut_off_between_the_two_renames(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    save(kept, 1)
    kept.path.rename(kept.before)
    assert kept.load(value) == 1


def test_both_damaged(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    save(kept, 1)
    save(kept, 2)
    damage(kept.path)
    damage(kept.before)
    with pytest.raises(InputError, match="is damaged; delete it to begin the learning again"):
        kept.load(value)
    assert kept.path.exists()


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_seen(tmp_path_factory: pytest.TempPathFactory, position: float, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    kept, record = checkpoint(folder), folder / "record.json"
    save(kept, 1)
    write_record(record, {"value": 1})
    for file in (kept.path, record):
        content = bytearray(file.read_bytes())
        content[int(position * len(content))] ^= 1 << bit
        file.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        kept.load(value)
    with pytest.raises(DamagedError):
        read_record(record, {"value"})


def test_the_first_difference_to_another_work_is_named(tmp_path: Path) -> None:
    save(checkpoint(tmp_path), 1)
    with pytest.raises(InputError, match=r"of another learning \(lr was 0\.1 and is 0\.3\); delete it, or choose"):
        checkpoint(tmp_path, lr=0.3).load(value)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, record = checkpoint(tmp_path), tmp_path / "record.json"
    monkeypatch.setattr(checkpoint_module, "FORMAT", 7)
    save(kept, 1)
    write_record(record, {"value": 1})
    monkeypatch.undo()
    with pytest.raises(InputError, match="has format 7 and this version of fedunfold reads 1"):
        kept.load(value)
    with pytest.raises(InputError, match="has format 7 and this version of fedunfold reads 1"):
        read_record(record, {"value"})


def test_what_lacks_a_part_is_damaged(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    kept.save({}, {"value": 1})
    with pytest.raises(InputError, match="is damaged"):
        kept.load(value)
    write_record(tmp_path / "record.json", {"value": 1})
    with pytest.raises(DamagedError, match="it has no 'other'"):
        read_record(tmp_path / "record.json", {"other"})


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=4))
def test_records_come_back(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("record") / "record.json"
    content = {f"_{name}": value for name, value in content.items()}
    write_record(file, content)
    assert read_record(file, content.keys()) == content
    assert json.loads(file.read_text())["format"] == checkpoint_module.FORMAT


def test_content_without_a_checksum_does_not_hold() -> None:
    assert not verify_checksum(b"{}")
    assert not verify_checksum(b'{"checksum": "' + b"0" * 64 + b'"}')
    assert verify_checksum(embed_checksum(b'{"checksum": "' + b"0" * 64 + b'"}'))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1] was 2 and is 3"),
        ({"a": [1]}, {"a": [1, 2]}, "a was [1] and is [1, 2]"),
        ({}, {"a": False}, "a was nothing and is False"),
        ({"a": 1, "b": 2}, {"b": 3}, "a was 1 and is nothing"),
        ({"digest": "a" * 64}, {"digest": "b" * 64}, "digest was aaaaaaaaaaaa… and is bbbbbbbbbbbb…"),
    ],
)
def test_first_difference(before: object, now: object, expected: str | None) -> None:
    assert first_difference(before, now) == expected

"""Files are whole or untouched."""

from pathlib import Path

import pytest

from fedunfold.core.errors import WriteError
from fedunfold.io.atomic import remove_stale_temp_files, write_atomically


def write(path: Path, words: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(words))


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "weights.txt"
    write(path, "old")
    write(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("old")

    def look_meanwhile(temporary: Path) -> None:
        temporary.write_text("half")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
        assert temporary.suffix == path.suffix

    write_atomically(path, look_meanwhile)
    assert path.read_text() == "half"


@pytest.mark.parametrize("failure", [RuntimeError("stop"), KeyboardInterrupt()])
def test_a_failing_writer_leaves_everything_as_it_was(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise failure

    with pytest.raises(type(failure)):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left on device") as caught:
        write_atomically(path, fail)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("below", ["weights.txt", "folder/weights.txt"])
def test_a_place_that_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / below
    with pytest.raises(WriteError, match="cannot write") as caught:
        write(path, "words")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").mkdir()
    with pytest.raises(WriteError, match="cannot write"):
        write(tmp_path / "weights.txt", "words")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.txt"]


def test_only_half_written_files_of_ours_are_removed(tmp_path: Path) -> None:
    ours = [
        tmp_path / ".weights-partial-a1b2c3_d.safetensors",
        tmp_path / "unfinished" / ".asked-partial-00000000.json",
    ]
    theirs = [tmp_path / ".mine-partial-notes.txt", tmp_path / "other" / ".x-partial-a1b2c3_d.txt"]
    for file in (*ours, *theirs):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (tmp_path / ".x-partial-a1b2c3_e").mkdir()
    remove_stale_temp_files(tmp_path, "unfinished")
    assert not any(file.exists() for file in ours)
    assert all(file.exists() for file in theirs)

"""Feature files: what is written is read again, what is wrong is named, and how rows are scaled and split."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fedunfold.core.errors import InputError
from fedunfold.data.vision import Features, files, load_features, split
from fedunfold.data.vision.splitting import unit_rows
from tests.support.vision import one_line

DOGS = Path(os.environ.get("FEDUNFOLD_DATA") or "no-data-folder") / "dogs_deit_tiny.npz"


def table(classes: int = 3, rows: int = 20) -> Features:
    stream = np.random.default_rng(0)
    return Features(
        stream.normal(size=(rows, 5)).astype(np.float32),
        stream.integers(0, classes, rows),
        tuple(f"ä/{i}.jpg" for i in range(rows)),
        tuple(f"class {c}" for c in range(classes)),
    )


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("classes", [1, 256, 300])
def test_round_trip(tmp_path: Path, ending: str, classes: int) -> None:
    given, path = table(classes), tmp_path / f"f{ending}"
    about = files.About("m", "i", "b", "float32", (files.Skipped("x/\udc80.png", "why"),))
    files.save_features(path, given, about)
    found = load_features(str(path))
    assert found.x.dtype == np.float32 and found.y.dtype == np.int64
    assert np.array_equal(found.x, given.x) and np.array_equal(found.y, given.y)
    assert (found.names, found.classes) == (given.names, given.classes)
    assert files.read_about(path) == about


def test_float16_that_overflows_is_named(tmp_path: Path) -> None:
    given = table()
    given.x[4, 2] = 1e6
    with pytest.raises(InputError) as caught:
        files.save_features(tmp_path / "f.npz", given, files.About("m", "i", "b", "float16", ()))
    one_line(caught, "ä/4.jpg", "float16", "float32")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not DOGS.exists(), reason="FEDUNFOLD_DATA names no folder with dogs_deit_tiny.npz")
def test_the_dogs_file_loads_and_splits() -> None:
    dogs = load_features(DOGS)
    assert dogs.x.shape == (20580, 192) and dogs.x.dtype == np.float32
    assert len(dogs.classes) == 120 and dogs.names[0].startswith(dogs.classes[0])
    data = split(dogs)
    counts, test = np.bincount(dogs.y), np.bincount(data.y_test)
    assert np.abs(test - 0.2 * counts).max() <= 0.5
    assert len(data.y_train) + len(data.y_test) == 20580


COLUMNS: dict[str, Any] = {
    "x": np.ones((4, 3), np.float16),
    "y": np.array([0, 1, 1, 0], np.uint8),
    "name": np.array(["a", "b", "c", "d"]),
    "synset": np.array(["p", "q"]),
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": np.full((4, 3), np.nan, np.float32)}, "x in"),
    ({"x": np.full((4, 3), np.inf, np.float16)}, "x in"),
    ({"x": np.ones((4, 3), np.uint8)}, "x in"),
    ({"x": np.ones((4, 3, 1), np.float32)}, "x in"),
    ({"x": np.ones((0, 3), np.float32), "y": np.ones(0, np.uint8)}, "x in"),
    ({"y": np.array([0, 1, 2, 0], np.uint8)}, "y in"),
    ({"y": np.array([0, -1, 0, 0])}, "y in"),
    ({"y": np.array([0.0, 1, 0, 0])}, "y in"),
    ({"y": np.array([0, 1])}, "y in"),
    ({"name": np.array(["a"])}, "name in"),
    ({"name": np.array([1, 2, 3, 4])}, "name in"),
    ({"synset": np.array(["p", "p"])}, "synset in"),
    ({"synset": np.array([], np.str_)}, "synset in"),
    ({"x": None}, "has no x"),
    ({"name": None}, "has no name"),
]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize(("change", "named"), WRONG)
def test_wrong_field_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], named: str, ending: str) -> None:
    path = tmp_path / f"f{ending}"
    columns = {name: value for name, value in (COLUMNS | change).items() if value is not None}
    if ending == ".npz":
        np.savez(path, **columns)
    else:
        texts = {name: columns.pop(name).tolist() for name in ("name", "synset") if name in columns}
        save_file(columns, path, metadata={files.METADATA: json.dumps(texts)})
    with pytest.raises(InputError) as caught:
        load_features(path)
    one_line(caught, path, named)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    np.savez(path, **COLUMNS | {"name": np.array([{"a": 1}] * 4, dtype=object)})
    with pytest.raises(InputError) as caught:
        load_features(path)
    one_line(caught, "name in", path)


def test_text_of_no_characters(tmp_path: Path) -> None:
    """numpy reads it, and fails with an error of the interpreter's own when the strings are asked for."""
    impossible = np.array([0x11FFFF], dtype=np.uint32).view("<U1")
    np.savez(tmp_path / "f.npz", x=np.zeros((1, 2)), y=np.zeros(1, int), name=np.array(["a"]), synset=impossible)
    with pytest.raises(InputError) as caught:
        load_features(tmp_path / "f.npz")
    one_line(caught, "synset", "f.npz", "characters")


@pytest.mark.parametrize("content", [b"", b"garbage", b'\x08\0\0\0\0\0\0\0{"a": 1}'])
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_unreadable_files(tmp_path: Path, ending: str, content: bytes) -> None:
    path = tmp_path / f"f{ending}"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_features(path)
    one_line(caught, path)


@pytest.mark.parametrize(("name", "reason"), [("f.npz", "does not exist"), ("f.safetensors", "does not exist")])
def test_missing_files(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        load_features(tmp_path / name)
    one_line(caught, name, reason)


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.npz or \.safetensors"):
        load_features(tmp_path / "f.csv")


# --- the split ---


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_split_takes_an_exact_share_of_every_class(sizes: list[int], seed: int) -> None:
    y = np.repeat(np.arange(len(sizes)), sizes)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    classes = tuple(f"c{c}" for c in range(len(sizes)))
    rows = Features(x, y, ("",) * len(y), classes)
    expected = [(2 * n + 5) // 10 for n in sizes]  # n/5, half a row up, in integers
    if not sum(expected):
        with pytest.raises(InputError, match="no test row"):
            split(rows, seed=seed)
        return
    data = split(rows, seed=seed)
    assert np.bincount(data.y_test, minlength=len(sizes)).tolist() == expected
    together = np.concatenate([data.x_train, data.x_test])[:, 0]
    assert sorted(together.tolist()) == x[:, 0].tolist()
    assert (np.diff(data.x_train[:, 0]) > 0).all() and (np.diff(data.x_test[:, 0]) > 0).all()
    assert np.array_equal(y[data.x_test[:, 0].astype(int)], data.y_test)


def test_split_depends_on_the_seed_and_the_class_alone() -> None:
    rows = Features(np.arange(40, dtype=np.float32)[:, None], np.repeat([0, 1], 20), ("",) * 40, ("a", "b"))
    first = split(rows, seed=1)
    assert np.array_equal(first.x_test, split(rows, seed=1).x_test)
    assert not np.array_equal(first.x_test, split(rows, seed=2).x_test)
    alone = Features(rows.x[20:], np.zeros(20, np.int64), ("",) * 20, ("b",))
    assert np.array_equal(split(alone, seed=1).x_test, first.x_test[first.y_test == 1])


def test_rows_too_large_to_be_squared_are_named() -> None:
    features = Features(np.array([[1, 2], [3, 1e30]], np.float32), np.array([0, 1]), ("a", "b"), ("x", "y"))
    with pytest.raises(InputError, match="features of b are too large"):
        unit_rows(features)


def test_unit_rows_have_a_mean_square_of_one() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [-1e-3, 0.0]], dtype=np.float32)
    scaled = unit_rows(Features(x, np.array([0, 1, 1]), ("a", "b", "c"), ("x", "y"))).x
    assert scaled.dtype == np.float32
    assert scaled[0].tolist() == pytest.approx([3 / np.sqrt(12.5), 4 / np.sqrt(12.5)])
    assert scaled[1].tolist() == [0, 0]
    assert np.square(scaled).mean(1).tolist() == pytest.approx([1, 0, 1])


def test_split_always_leaves_a_row_to_train_on() -> None:
    rows = Features(np.ones((3, 1), np.float32), np.array([0, 0, 1]), ("",) * 3, ("a", "b"))
    data = split(rows, test_fraction=0.9)
    assert data.y_train.tolist() == [0, 1] and data.y_test.tolist() == [0]


@pytest.mark.parametrize("fraction", [0, 1, -1, float("nan")])
def test_split_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        split(table(), test_fraction=fraction)

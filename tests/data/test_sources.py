"""Datasets: the fixed digits split, MNIST from file, cache or download, and users' own files."""

import os
import zipfile
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data import sources

HAS_MNIST = (Path(os.environ.get("FEDUNFOLD_DATA") or "no-data-folder") / "mnist.npz").exists()


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def one_line(caught: pytest.ExceptionInfo[InputError], *named: str) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for text in named:
        assert text in message


def test_digits_test_set_is_balanced_and_disjoint_from_training() -> None:
    data = sources.load_digits()
    assert np.bincount(data.y_test).tolist() == [50] * 10
    assert data.x_train.shape == (1297, 64) and data.x_train.dtype == np.float32
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    train, test = ({row.tobytes() for row in x} for x in (data.x_train, data.x_test))
    assert len(train) + len(test) == 1797 and not train & test


def test_digits_split_is_always_the_same() -> None:
    first, second = sources.load_digits(), sources.load_digits()
    assert np.array_equal(first.x_test, second.x_test) and np.array_equal(first.y_train, second.y_train)


ARRAYS: dict[str, Any] = {
    "x_train": np.full((4, 2, 2), 255, dtype=np.uint8),
    "y_train": np.array([0, 1, 0, 1]),
    "x_test": np.zeros((2, 2, 2), dtype=np.uint8),
    "y_test": np.array([0, 1], dtype=np.uint8),
}


def test_own_file_keeps_shapes_and_scales_bytes(tmp_path: Path) -> None:
    data = sources.load_npz(write(tmp_path / "own.npz", **ARRAYS))
    assert data.x_train.shape == (4, 2, 2) and data.x_train.dtype == np.float32
    assert data.x_train.max() == 1
    assert data.y_test.dtype == np.int64
    floats = ARRAYS | {"x_train": np.full((4, 3), -7.5), "x_test": np.ones((2, 3), dtype=np.float16)}
    assert sources.load_npz(write(tmp_path / "f.npz", **floats)).x_train.min() == -7.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"y_train": np.array([0, 1])}, "y_train in"),
        ({"x_train": np.array([[None]] * 4, dtype=object)}, "x_train in"),
        ({"x_train": np.full((4, 2), "a")}, "x_train in"),
        ({"x_test": np.zeros((2, 5), dtype=np.uint8)}, "x_test in"),
        ({"x_test": np.zeros((2, 2, 2))}, "x_test in"),
        ({"y_test": np.array([0.0, 1.0])}, "y_test in"),
        ({"y_test": np.array([0, -1])}, "y_test in"),
    ],
)
def test_wrong_field_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "own.npz", **ARRAYS | change)
    with pytest.raises(InputError) as caught:
        sources.load_npz(path)
    one_line(caught, named, str(path))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "own.npz", **ARRAYS).read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(b"\xff" * 16)] ^= 0xFF  # one byte of x_train: the checksum no longer fits
    files = {
        "cut.npz": whole[: len(whole) // 2],
        "empty.npz": b"",
        "text.npz": b"no",
        "bad.npz": bytes(damaged),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            sources.load_npz(path)
        one_line(caught, name)
    np.save(tmp_path / "single.npy", np.zeros(3))
    for path in (tmp_path / "single.npy", tmp_path / "absent.npz", tmp_path):
        with pytest.raises(InputError) as caught:
            sources.load_npz(path)
        one_line(caught, path.name)


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train", "hello")
    with pytest.raises(InputError) as caught:
        sources.load_npz(path)
    one_line(caught, "x_train", "other.npz")


def test_missing_field_says_what_the_file_has(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", x_a=np.zeros((2, 2)))
    with pytest.raises(InputError) as caught:
        sources.load_npz(path)
    one_line(caught, "no x_train", "only x_a", "'given'")


X, Y = np.zeros((2, 3)), np.array([0, 1])


def test_arrays_per_client(tmp_path: Path) -> None:
    path = write(tmp_path / "c.npz", **{"x_site-a": X, "y_site-a": Y, "x_b": X, "y_b": Y, "x_test": X, "y_test": Y})
    clients, test = sources.load_npz_clients(path)
    assert set(clients) == {"site-a", "b"}
    assert clients["b"][0].shape == (2, 3) and test[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (ARRAYS, "x_train"),
        ({"x_a": X, "x_test": X, "y_test": Y}, "y_a"),
        ({"y_a": Y, "x_test": X, "y_test": Y}, "x_a"),
        ({"x_a": X, "y_a": Y}, "x_test"),
        ({"x_test": X, "y_test": Y}, "no client"),
        ({"x_a": X, "y_a": Y, "extra": Y, "x_test": X, "y_test": Y}, "extra"),
        ({"x_a": X, "y_a": Y[:1], "x_test": X, "y_test": Y}, "y_a in"),
        ({"x_a": np.full((2, 3), np.inf), "y_a": Y, "x_test": X, "y_test": Y}, "x_a in"),
    ],
)
def test_wrong_arrays_per_client_are_named(tmp_path: Path, arrays: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "c.npz", **arrays)
    with pytest.raises(InputError) as caught:
        sources.load_npz_clients(path)
    one_line(caught, named, "c.npz")


@pytest.mark.skipif(not HAS_MNIST, reason="needs mnist.npz in the folder that FEDUNFOLD_DATA names")
def test_mnist_is_flat_and_scaled() -> None:
    data = sources.load_mnist()
    assert data.x_train.shape == (60000, 784) and data.x_test.shape == (10000, 784)
    assert data.x_train.dtype == np.float32
    assert data.x_train.min() == -1 and data.x_train.max() == 1


@pytest.fixture
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data folder, and an empty cache that is returned."""
    monkeypatch.delenv("FEDUNFOLD_DATA", raising=False)
    monkeypatch.setenv("FEDUNFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_mnist_offline_says_what_to_set(no_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(InputError) as caught:
        sources.load_mnist()
    one_line(caught, "FEDUNFOLD_DATA", "mnist.npz")


def openml(train: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    """Blank images in OpenML's layout, with labels as its strings."""
    counts = (*train, *sources.MNIST_TEST_COUNTS)
    y = np.concatenate([np.full(n, str(i % 10)) for i, n in enumerate(counts)])
    return np.zeros((len(y), 784), dtype=np.uint8), y


def test_mnist_download_is_cached_whole(no_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(*_: Any, **__: Any) -> Any:
        calls.append(1)
        return openml(sources.MNIST_TRAIN_COUNTS)

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    assert sources.load_mnist().y_test.shape == (10000,)
    assert sources.load_mnist().x_train.max() == -1
    assert len(calls) == 1
    assert [file.name for file in no_files.iterdir()] == ["mnist.npz"]


def test_mnist_with_other_contents_is_refused(no_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDUNFOLD_DATA", str(no_files))
    no_files.mkdir()
    write(no_files / "mnist.npz", **ARRAYS)
    with pytest.raises(InputError) as caught:
        sources.load_mnist()
    one_line(caught, "x_train", "mnist.npz")
    x, y = openml((5924, 6741, *sources.MNIST_TRAIN_COUNTS[2:]))
    labels = y.astype(np.uint8)
    wrong = {"x_train": x[:60000], "y_train": labels[:60000], "x_test": x[60000:], "y_test": labels[60000:]}
    write(no_files / "mnist.npz", **wrong)
    with pytest.raises(InputError) as caught:
        sources.load_mnist()
    one_line(caught, "y_train", "label counts")

"""Fashion-MNIST: where its files are looked for, IDX files, and files that hold something else."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedunfold.config import Client, Environment
from fedunfold.core.errors import InputError
from fedunfold.data import fashion_mnist
from fedunfold.data.fashion_mnist import FILES, load_fashion_mnist, read_idx

SMALL = 40, 20


def write_idx(path: Path, values: NDArray[np.uint8]) -> Path:
    lengths = b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"\0\0\x08" + bytes([values.ndim]) + lengths + values.tobytes(), 1))
    return path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Few images in every class, no network, and nothing installed; an empty folder is returned."""

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    train, test = SMALL
    monkeypatch.setattr(fashion_mnist, "TRAIN_COUNTS", (train // 10,) * 10)
    monkeypatch.setattr(fashion_mnist, "TEST_COUNTS", (test // 10,) * 10)
    shapes = {"x_train": (train, 28, 28), "y_train": (train,), "x_test": (test, 28, 28), "y_test": (test,)}
    monkeypatch.setattr(fashion_mnist, "SHAPES", shapes)
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setenv("FEDUNFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDUNFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fill(folder: Path, brightness: int = 255) -> None:
    for part, count in zip(("train", "test"), SMALL, strict=True):
        write_idx(folder / FILES[f"x_{part}"][0], np.full((count, 28, 28), brightness, dtype=np.uint8))
        write_idx(folder / FILES[f"y_{part}"][0], np.arange(count, dtype=np.uint8) % 10)


def test_values_are_scaled_and_flat(small: Path) -> None:
    fill(small / "data" / "fashion-mnist")
    found = load_fashion_mnist()
    assert found.x_train.shape == (40, 784) and found.x_test.shape == (20, 784)
    assert (found.x_train == 1).all() and found.x_train.dtype == np.float32
    assert found.y_train[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_ones_own_folder_comes_first_then_the_package_then_the_cache(small: Path) -> None:
    for place, brightness in (("cache/fashion-mnist", 0), ("debian", 51), ("data/fashion-mnist", 255)):
        fill(small / place, brightness)
        assert load_fashion_mnist().x_train[0, 0] == pytest.approx(brightness / 127.5 - 1)


def test_an_environment_names_it(small: Path) -> None:
    fill(small / "debian")
    settings: dict[str, Any] = {"data": {"source": "fashion-mnist"}, "partition": {"kind": "iid"}}
    clients = Client(key="a", epochs=1), Client(key="b", epochs=1)
    env = Environment(name="clothes", clients=clients, rounds=1, batch_size=5, lr=0.1, **settings)
    assert env.load().sizes == (20, 20)


def test_offline_says_where_to_get_it(small: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"train-images-idx3-ubyte.gz could not be downloaded \(no network\); get it from"
        r" https://github.com/zalandoresearch/fashion-mnist \(Debian: package dataset-fashion-mnist\) and "
        r"put it into the folder fashion-mnist in the one that FEDUNFOLD_DATA names",
    ):
        load_fashion_mnist()


def test_other_labels_are_refused(small: Path) -> None:
    fill(small / "debian")
    write_idx(small / "debian" / FILES["y_test"][0], np.zeros(20, dtype=np.uint8))
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.gz is not Fashion-MNIST's label counts"):
        load_fashion_mnist()


def test_an_idx_file(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = write_idx(tmp_path / "a.gz", values)
    assert np.array_equal(read_idx(path, (2, 3, 4)), values)
    for other in ((2, 4, 3), (24,), (1, 3, 4), (3, 3, 4)):
        with pytest.raises(InputError, match=r"a.gz is no IDX file of bytes of shape"):
            read_idx(path, other)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = write_idx(tmp_path / "a.gz", np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)).read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    contents = {"cut.gz": whole[:-30], "text.gz": b"no gzip", "empty.gz": b"", "bad.gz": bytes(damaged)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            read_idx(tmp_path / name, (500,))

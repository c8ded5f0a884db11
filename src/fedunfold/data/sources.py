"""Raw datasets: digits (comes with scikit-learn), MNIST, and .npz files with custom data."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError, WriteError
from fedunfold.core.rng import generator
from fedunfold.core.task import Task
from fedunfold.data.arrays import features, labels
from fedunfold.data.npz import first_line, read_npz
from fedunfold.io.atomic import write_atomically

FIELDS = ("x_train", "y_train", "x_test", "y_test")
DIGITS_TEST_PER_CLASS = 50
MNIST_TRAIN_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST_COUNTS = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)

Pair = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to be partitioned over clients, and rows that no client gets.

    Attributes:
        x_train: Training samples.
        y_train: Their targets.
        x_test: Test samples.
        y_test: Their targets.
    """

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]


def load_digits() -> Dataset:
    """scikit-learn's 1797 8×8 digits as 64 features x/16 in [0, 1]; 50 of each class are the test set.

    The split is always the same one.
    """
    from sklearn.datasets import load_digits as digits  # here, because importing it takes a second

    x, y = digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    order = generator(0, "digits-test").permutation(len(y))
    test = np.sort(np.concatenate([order[y[order] == c][:DIGITS_TEST_PER_CLASS] for c in range(10)]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Dataset(x[train], y[train], x[test], y[test])


def load_mnist() -> Dataset:
    """MNIST's own 60000 training and 10000 test images as 784 features x/127.5 − 1 in [−1, 1].

    Read from mnist.npz in the folder FEDUNFOLD_DATA names; otherwise from the cache (FEDUNFOLD_CACHE, or
    ~/.cache/fedunfold), downloaded into it from OpenML the first time.
    """
    path = _mnist_file()
    arrays = read_npz(path, FIELDS)
    named = {field: (f"{field} in {path}", arrays[field]) for field in FIELDS}
    return checked_images(named, "MNIST", MNIST_TRAIN_COUNTS, MNIST_TEST_COUNTS)


def checked_images(
    arrays: Mapping[str, tuple[str, NDArray[Any]]], name: str, train: Sequence[int], test: Sequence[int]
) -> Dataset:
    """28×28 images of bytes in ten classes as 784 features x/127.5 − 1 in [−1, 1], once they are the right ones.

    Args:
        arrays: By field what messages call an array, and the array.
        name: What the data are called.
        train: How many training images each class has.
        test: The same of the test images.

    Raises:
        InputError: An array has another shape, type or other label counts.
    """
    checked: list[Any] = []
    for part, counts in (("train", train), ("test", test)):
        (images, x), (classes, y) = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.size != sum(counts) * 784 or len(x) != sum(counts):
            raise InputError(
                f"{images} has shape {x.shape} and type {x.dtype} where {name} has "
                f"({sum(counts)}, 28, 28) of uint8; delete the file or replace it."
            )
        found = labels(y, classes, len(x), 10)
        if np.bincount(found, minlength=10).tolist() != list(counts):
            raise InputError(f"{classes} is not {name}'s label counts; delete the file or replace it.")
        checked += [x.reshape(-1, 784).astype(np.float32) / np.float32(127.5) - 1, found]
    return Dataset(*checked)


def load_npz(path: Path, task: Task | None = None) -> Dataset:
    """Read custom data that are not divided yet.

    Args:
        path: A file with x_train, y_train, x_test and y_test.
        task: What a model is trained for; without it, classification.

    Returns:
        The arrays; shapes stay as they are, uint8 becomes x/255.

    Raises:
        InputError: The file or an array cannot be used.
    """
    train, test = _pairs(read_npz(path, FIELDS), ("train", "test"), path, task).values()
    return Dataset(*train, *test)


def load_npz_clients(path: Path, task: Task | None = None) -> tuple[dict[str, Pair], Pair]:
    """Read custom data that are divided already.

    Args:
        path: A file with x_<key> and y_<key> for every client, and x_test, y_test.
        task: What a model is trained for; without it, classification.

    Returns:
        (x, y) by client, and (x, y) of the test set.

    Raises:
        InputError: The file or an array cannot be used.
    """
    arrays = read_npz(path)
    if "x_train" in arrays:
        raise InputError(f"{path} has x_train, so it is not divided; use another partition than 'given'.")
    for name in arrays:
        if not (name.startswith(("x_", "y_")) and name[2:]):
            raise InputError(f"{path} has {name}, which is no client's; name arrays x_<key> and y_<key>.")
    owners = {name[2:] for name in arrays}
    for name in sorted({f"{axis}_{owner}" for axis in "xy" for owner in owners} | {"x_test", "y_test"}):
        if name not in arrays:
            raise InputError(f"{path} has no {name}; it needs x_<key> and y_<key> for every client and test.")
    pairs = _pairs(arrays, sorted(owners), path, task)
    test = pairs.pop("test")
    if not pairs:
        raise InputError(f"{path} has no client; add x_<key> and y_<key> for each.")
    return pairs, test


def _pairs(arrays: Mapping[str, NDArray[Any]], owners: Sequence[str], path: Path, task: Task | None) -> dict[str, Pair]:
    """The checked x_<owner> and y_<owner> of each owner."""
    named = {f"x_{owner} in {path}": arrays[f"x_{owner}"] for owner in owners}
    x = features(named, keep_integers=task is not None and task.keeps_integers)
    pairs = {}
    for owner, rows in zip(owners, x.values(), strict=True):
        name, targets = f"y_{owner} in {path}", arrays[f"y_{owner}"]
        pairs[owner] = rows, labels(targets, name, len(rows)) if task is None else task.check_targets(targets, name)
    return pairs


def cache_folder() -> Path:
    """Where downloads are saved: FEDUNFOLD_CACHE, or ~/.cache/fedunfold."""
    return Path(os.environ.get("FEDUNFOLD_CACHE") or Path.home() / ".cache" / "fedunfold")


def _mnist_file() -> Path:
    """Where it is, downloaded if need be."""
    folder = os.environ.get("FEDUNFOLD_DATA")
    if folder and (given := Path(folder) / "mnist.npz").exists():
        return given
    cached = cache_folder() / "mnist.npz"
    if not cached.exists():
        _download_mnist(cached)
    return cached


def _download_mnist(target: Path) -> None:
    """OpenML's mnist_784 (training rows first) as the four arrays, moved into place only when complete."""
    from sklearn.datasets import fetch_openml

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each retry warns; the error below says it once
            x, y = fetch_openml("mnist_784", version=1, as_frame=False, return_X_y=True, cache=False)
    except (OSError, ValueError, HTTPException) as error:
        raise InputError(
            f"MNIST could not be downloaded ({first_line(error)}); set FEDUNFOLD_DATA to a folder with mnist.npz."
        ) from error
    images, classes = x.astype(np.uint8).reshape(-1, 28, 28), y.astype(np.uint8)
    arrays = (images[:60000], classes[:60000], images[60000:], classes[60000:])
    try:
        write_atomically(target, lambda file: np.savez_compressed(file, **dict(zip(FIELDS, arrays, strict=True))))
    except WriteError as error:
        raise WriteError(f"{target} cannot be written; set FEDUNFOLD_CACHE to a folder that can be.") from error

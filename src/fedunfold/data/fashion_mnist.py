"""Fashion-MNIST: photographs of clothes in ten classes, as large as MNIST and harder (Xiao et al. 2017)."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.natural.files import PublicFile, locate
from fedunfold.data.npz import first_line
from fedunfold.data.sources import Dataset, checked_images

BYTES = 8  # IDX's code for uint8
URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
FILES = {
    "x_train": ("train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    "y_train": ("train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    "x_test": ("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    "y_test": ("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
}
TRAIN_COUNTS, TEST_COUNTS = (6000,) * 10, (1000,) * 10
SHAPES = {
    f"{axis}_{part}": (sum(counts), *rest)
    for part, counts in (("train", TRAIN_COUNTS), ("test", TEST_COUNTS))
    for axis, rest in (("x", (28, 28)), ("y", ()))
}


def load_fashion_mnist() -> Dataset:
    """Its own 60000 training and 10000 test images as 784 features x/127.5 − 1 in [−1, 1].

    Read from the folder fashion-mnist in the one that FEDUNFOLD_DATA names, where Debian's package
    dataset-fashion-mnist puts it, or from the cache, downloaded into it the first time.

    Raises:
        InputError: A file is nowhere, or is not Fashion-MNIST's; the message says where to get it.
    """
    arrays = {}
    for field, (name, sha256) in FILES.items():
        page = "https://github.com/zalandoresearch/fashion-mnist (Debian: package dataset-fashion-mnist)"
        path = locate(PublicFile(name, page, f"{URL}/{name}", sha256, "fashion-mnist", DEBIAN))
        arrays[field] = str(path), read_idx(path, SHAPES[field])
    return checked_images(arrays, "Fashion-MNIST", TRAIN_COUNTS, TEST_COUNTS)


def read_idx(path: Path, shape: Sequence[int]) -> NDArray[np.uint8]:
    """Read bytes of a known shape from a gzipped IDX file.

    Two zero bytes, the type, the number of axes, the length of each as four bytes, then the values. No more is
    decompressed than the shape has, whatever the file contains.

    Args:
        path: The file.
        shape: What it has to hold.

    Raises:
        InputError: It cannot be read, or holds something else.
    """
    head = bytes([0, 0, BYTES, len(shape)]) + np.array(shape, dtype=">i4").tobytes()
    expected = len(head) + math.prod(shape)
    try:
        with gzip.open(path) as file:
            content = file.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no gzip file that can be read ({first_line(error)}); get it again.") from error
    if len(content) != expected or not content.startswith(head):
        raise InputError(f"{path} is no IDX file of bytes of shape {tuple(shape)}; get it again.")
    return np.frombuffer(content, dtype=np.uint8, offset=len(head)).reshape(shape)

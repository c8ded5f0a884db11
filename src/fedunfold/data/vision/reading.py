"""Images decoded by several threads, ahead of whoever works on them."""

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.data.npz import first_line
from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import ImageFile, read_rgb
from fedunfold.data.vision.partial import Batch

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[Any]


def read_ahead(
    files: Sequence[ImageFile], batch_size: int, prepare: Callable[["Image"], Pixels], first: int = 0
) -> Generator[Batch]:
    """Read images batch by batch; the next batch is decoded while this one is computed.

    Args:
        files: The images.
        batch_size: How many are read for a batch.
        prepare: Turns an RGB image into an array of the same shape for all, in any thread.
        first: The file to begin with.

    Yields:
        The arrays of a batch, and which of its files were skipped.
    """
    from PIL import Image, UnidentifiedImageError

    def read(file: ImageFile) -> Pixels | Skipped:
        try:
            return prepare(read_rgb(file.path))
        except Exception as error:  # decoders of damaged files raise nearly anything
            if isinstance(error, UnidentifiedImageError):
                return Skipped(file.name, "is not an image")
            return Skipped(file.name, getattr(error, "strerror", None) or first_line(error))

    def submit(start: int) -> tuple[int, list[Future[Pixels | Skipped]]]:
        return start, [pool.submit(read, file) for file in files[start : start + batch_size]]

    Image.init()  # loading pillow's formats is not safe from several threads
    starts = iter(range(first, len(files), batch_size))
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module="PIL")  # odd EXIF data, palettes; the image was still read
        queue = deque(submit(start) for start in itertools.islice(starts, 2))
        while queue:
            start, futures = queue.popleft()
            found = dict(enumerate((future.result() for future in futures), start))
            pixels = {row: item for row, item in found.items() if not isinstance(item, Skipped)}
            x = np.stack(list(pixels.values())) if pixels else np.empty((0, 0), np.float32)
            skipped = tuple(item for item in found.values() if isinstance(item, Skipped))
            yield Batch(start, start + len(futures), np.array(list(pixels), np.int64), x, skipped)
            queue.extend(submit(start) for start in itertools.islice(starts, 1))

"""Images decoded by several threads, ahead of whoever works on them."""

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedunfold.data.npz import first_line
from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import ImageFile, read_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[Any]


def read_ahead(
    files: Sequence[ImageFile], batch_size: int, prepare: Callable[["Image"], Pixels]
) -> Generator[tuple[int, list[Pixels | Skipped]]]:
    """(position, images or why not) batch by batch; the next one is decoded while this one is computed."""
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
    starts = iter(range(0, len(files), batch_size))
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module="PIL")  # odd EXIF data, palettes; the image was still read
        queue = deque(submit(start) for start in itertools.islice(starts, 2))
        while queue:
            start, futures = queue.popleft()
            yield start, [future.result() for future in futures]
            queue.extend(submit(start) for start in itertools.islice(starts, 1))

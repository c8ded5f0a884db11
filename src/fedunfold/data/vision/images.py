"""Image folders: one subfolder a class, every file in it either an image or reported.

Images are decoded by several threads, ahead of whoever works on them.
"""

import hashlib
import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.npz import first_line
from fedunfold.data.vision.files import Skipped

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[Any]


def visible_entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; hidden entries are left out, as file managers leave them."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}).") from error


@dataclass(frozen=True)
class ImageFile:
    """A file in a class folder.

    Attributes:
        name: Its path from the image folder, with slashes on every system.
        path: Where it is.
        label: The number of its class.
    """

    name: str
    path: Path
    label: int


@dataclass(frozen=True)
class ImageFolder:
    """A folder with one subfolder for each class.

    Attributes:
        root: The folder.
        classes: In alphabetical order.
        files: By class and name.
        stray: What lies where no image belongs.
    """

    root: Path
    classes: tuple[str, ...]
    files: tuple[ImageFile, ...]
    stray: tuple[Skipped, ...]

    @classmethod
    def scan(cls, folder: Path) -> "ImageFolder":
        """Look for `folder`/class/…/file; hidden files and folders are left out, as file managers leave them."""
        if not folder.is_dir():
            raise InputError(f"image folder {folder}: is not a folder; check the path.")
        entries = visible_entries(folder)
        classes = [path for path in entries if path.is_dir()]
        if not classes:
            raise InputError(f"image folder {folder}: has no subfolder; put the images of each class in one.")
        stray = [Skipped(path.name, "lies in no class folder") for path in entries if not path.is_dir()]
        files: list[ImageFile] = []
        for label, home in enumerate(classes):
            for parent, subfolders, found in os.walk(home, onerror=_refuse):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                inside = [Path(parent, name) for name in found if not name.startswith(".")]
                files += [ImageFile(path.relative_to(folder).as_posix(), path, label) for path in inside]
                # Links to folders are not followed, since they may run in circles.
                links = [path for name in subfolders if (path := Path(parent, name)).is_symlink()]
                stray += [Skipped(path.relative_to(folder).as_posix(), "links to a folder") for path in links]
        if not files:
            raise InputError(f"image folder {folder}: its {len(classes)} class folder(s) hold no file.")
        files.sort(key=lambda file: (file.label, file.name))
        return cls(folder, tuple(path.name for path in classes), tuple(files), tuple(stray))

    def digest(self) -> str:
        """SHA-256 of classes, names and sizes, which distinguishes collections without reading all of them."""
        content = hashlib.sha256()
        for name in self.classes:
            content.update(os.fsencode(name) + b"\0")
        for file in self.files:
            size = file.path.stat().st_size if file.path.exists() else -1  # a dangling link has none
            content.update(os.fsencode(file.name) + b"\0%d\0" % size)
        return content.hexdigest()


def read_rgb(path: Path) -> "Image":
    """The image as people see it (turned according to its EXIF data), in 8-bit RGB; transparency is dropped."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        if image.mode.startswith(("I", "F")):  # pillow would clip these to white instead of scaling them
            raise ValueError(f"has pixels of more than 8 bits (mode {image.mode})")
        return ImageOps.exif_transpose(image).convert("RGB")


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"image folder {error.filename}: cannot be read ({error.strerror}).") from error


@dataclass(frozen=True, eq=False)
class Batch:
    """Files start … stop−1 of an image folder.

    Attributes:
        start: The first file.
        stop: The file after the last.
        rows: The files that were read.
        x: Their pixels or features, [rows, …].
        skipped: The files that were not.
    """

    start: int
    stop: int
    rows: NDArray[np.int64]
    x: NDArray[Any]
    skipped: tuple[Skipped, ...]


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

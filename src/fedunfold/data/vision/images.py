"""Image folders: one subfolder a class, every file in it either an image or reported."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fedunfold.core.errors import InputError
from fedunfold.data.vision.files import Skipped

if TYPE_CHECKING:
    from PIL.Image import Image


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

"""Public files: one that the user brought, else a cached one, else a download that has the right checksum."""

import hashlib
import os
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError, WriteError
from fedunfold.data.npz import first_line
from fedunfold.data.sources import cache_folder
from fedunfold.io.atomic import is_plain_file, read_text, write_atomically

FOLDER = "natural"
LARGEST_DOWNLOAD = 32 * 2**20
SECONDS = 60
MISSING = ("?", "")


@dataclass(frozen=True)
class PublicFile:
    """A file that somebody publishes.

    Attributes:
        name: What it is called in the folder.
        page: Where a person gets it.
        url: Where a program gets it; none where no checksum is known, so that nothing unchecked is ever read.
        sha256: The checksum of a download.
        folder: Where it lies in FEDUNFOLD_DATA and in the cache.
        installed: The folder in which a package of the operating system puts it.
    """

    name: str
    page: str
    url: str | None = None
    sha256: str | None = None
    folder: str = FOLDER
    installed: Path | None = None


def locate(file: PublicFile) -> Path:
    """Find a public file: in its folder in FEDUNFOLD_DATA, then where a package installs it, then in the cache,
    downloaded into it if it can be.

    Args:
        file: The file.

    Returns:
        Its path.

    Raises:
        InputError: It is nowhere, and cannot be downloaded; the message says where to get it.
        WriteError: The cache cannot be written.
    """
    if given := os.environ.get("FEDUNFOLD_DATA"):
        brought = Path(given) / file.folder / file.name
        if is_plain_file(brought):
            return brought
    if file.installed is not None and is_plain_file(file.installed / file.name):
        return file.installed / file.name
    cached = cache_folder() / file.folder / file.name
    if not is_plain_file(cached):
        _download(file, cached)
    return cached


def read_public(file: PublicFile) -> tuple[str, str]:
    """Read a public file.

    Args:
        file: The file.

    Returns:
        What messages call it, and its text.

    Raises:
        InputError: It is nowhere, or is no text.
    """
    path = locate(file)
    try:
        return str(path), read_text(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check who may read it.") from error


def parse_numbers(rows: list[list[str]], name: str, first_line_number: int = 1) -> NDArray[np.float64]:
    """A table of numbers; "?" and empty cells are NaN.

    Args:
        rows: The cells of each line.
        name: What messages call the file.
        first_line_number: The number of the first line in the file.

    Returns:
        The numbers, [rows, columns].

    Raises:
        InputError: A line has another number of cells than the first, or a cell that is no number.
    """
    if not rows:
        raise InputError(f"{name} has no rows; get the file again.")
    table = np.empty((len(rows), len(rows[0])))
    for position, cells in enumerate(rows):
        where = f"{name}, line {position + first_line_number}:"
        if len(cells) != table.shape[1]:
            raise InputError(f"{where} has {len(cells)} cells, where {table.shape[1]} belong; get the file again.")
        for column, cell in enumerate(cells):
            try:
                table[position, column] = np.nan if cell.strip() in MISSING else float(cell)
            except ValueError as error:
                raise InputError(f"{where} {cell[:40]!r} is no number; get the file again.") from error
    if np.isinf(table).any():
        line = int(np.isinf(table).any(1).argmax()) + first_line_number
        raise InputError(f"{name}, line {line}: has an infinite number; get the file again.")
    return table


def _download(file: PublicFile, target: Path) -> None:
    """Fetch a file into its place, which it only takes with the right checksum."""
    by_hand = f"get it from {file.page} and put it into the folder {file.folder} in the one that FEDUNFOLD_DATA names"
    if file.url is None or file.sha256 is None:
        raise InputError(f"{file.name} is missing; {by_hand}.")
    try:
        with urllib.request.urlopen(file.url, timeout=SECONDS) as response:
            content: bytes = response.read(LARGEST_DOWNLOAD + 1)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise InputError(f"{file.name} could not be downloaded ({first_line(error)}); {by_hand}.") from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise InputError(f"{file.name} at {file.url} is not the file that is known (its checksum differs); {by_hand}.")
    try:
        write_atomically(target, lambda path: path.write_bytes(content))
    except WriteError as error:
        raise WriteError(f"{target} cannot be written; set FEDUNFOLD_CACHE to a folder that can be.") from error

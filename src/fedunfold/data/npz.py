"""Reading .npz files: never unpickling anything, every failure one line that names the file and the array."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.errors import InputError

UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
NUMBERS, NUMBERS_AND_TEXT = "uif", "uifU"


def read_npz(
    path: Path, wanted: Sequence[str] = (), *, optional: Sequence[str] = (), kinds: str = NUMBERS
) -> dict[str, NDArray[Any]]:
    """The wanted arrays (all of them when none is named), and of the optional ones those that are there.

    `kinds` are the numpy kinds an array may have.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise InputError(f"{path} is not an .npz file or is cut short; make it again.")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                names = [*wanted, *(name for name in optional if name in archive.files)] or archive.files
                return {name: _member(archive, name, path, kinds) for name in names}
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; check the path.") from error
    except InputError:  # a ValueError too, and already worded
        raise
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}).") from error


def first_line(error: BaseException) -> str:
    """The first sentence of what an error says, fit for a line of our own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0][:200].rstrip(".") if lines else type(error).__name__


def _member(archive: Any, name: str, path: Path, kinds: str) -> NDArray[Any]:
    if name not in archive.files:
        hint = "; use the partition 'given' for arrays per client" if name == "x_train" else ""
        raise InputError(f"{path} has no {name}, only {', '.join(sorted(archive.files)) or 'nothing'}{hint}.")
    try:
        array = archive[name]
    except UNREADABLE as error:
        raise InputError(f"{name} in {path} cannot be read ({first_line(error)}); save it again.") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
        words = "integers or floats" if kinds == NUMBERS else "numbers or text"
        raise InputError(f"{name} in {path} is not an array of {words}; save it as one.")
    return array

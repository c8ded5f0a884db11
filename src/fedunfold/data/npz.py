"""Reading .npz files: never unpickling anything, every failure one line that names the file and the array.

The size of an array is checked before it is allocated. The zip directory and the array's own header have to agree with
each other and with the bytes in the file, and a small file must not unpack to a huge one.
"""

import math
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import size_of
from fedunfold.io.limits import UNPACKED_BYTES

UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, LookupError, MemoryError, zipfile.BadZipFile, zlib.error)
NUMBERS, NUMBERS_AND_TEXT = "uif", "uifU"
RATIO = 10
"""Of bytes unpacked to bytes packed in a large file; numbers have less, and what has more can be stored unpacked."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # numpy's; others pack so tightly that the ratio shows nothing


def read_npz(
    path: Path, wanted: Sequence[str] = (), *, optional: Sequence[str] = (), kinds: str = NUMBERS
) -> dict[str, NDArray[Any]]:
    """Read arrays.

    Args:
        path: The file.
        wanted: The arrays that it must have; all that it has when none is named.
        optional: Arrays that it may have.
        kinds: The numpy kinds an array may have.

    Returns:
        The arrays by name.

    Raises:
        InputError: The file or an array cannot be used; the message names it.
    """
    try:
        size = size_of(path)
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise InputError(f"{path} is not an .npz file or is cut short; make it again.")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                _check_unpacked(archive.zip, path, size)
                names = [*wanted, *(name for name in optional if name in archive.files)] or archive.files
                return {name: _member(archive, name, path, kinds) for name in names}
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; check the path.") from error
    except InputError:  # a ValueError too, and already worded
        raise
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}).") from error


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a numpy file; the numbers come next.

    Args:
        file: Its bytes, from the beginning.

    Returns:
        Shape, whether columns come first, and type.

    Raises:
        ValueError: It is no header. numpy's parser raises anything on bytes of anybody's making.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        return readers[np.lib.format.read_magic(file)](file)
    except Exception as error:
        raise ValueError(f"its header is none of numpy's: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first sentence of an error, for a message of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0][:200].rstrip(".") if lines else type(error).__name__


def _check_unpacked(archive: zipfile.ZipFile, path: Path, size: int) -> None:
    """Refuse what is packed otherwise than numpy does, or into far less than it is."""
    members = archive.infolist()
    if odd := next((member for member in members if member.compress_type not in METHODS), None):
        raise InputError(f"{odd.filename} in {path} is packed as numpy never does; save it with np.savez.")
    if sum(member.compress_size for member in members) > size:
        raise InputError(f"{path} lists more than it holds; make it again.")
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(UNPACKED_BYTES.value, RATIO * size):
        raise InputError(
            f"{path} has {size} bytes and would unpack to {unpacked}; at most {UNPACKED_BYTES.value}, or {RATIO} times "
            f"its size, are allowed; save it with np.savez, which does not pack, or set {UNPACKED_BYTES.variable}."
        )


def _member(archive: Any, name: str, path: Path, kinds: str) -> NDArray[Any]:
    """One array of the archive."""
    if name not in archive.files:
        hint = "; use the partition 'given' for arrays per client" if name == "x_train" else ""
        raise InputError(f"{path} has no {name}, only {', '.join(sorted(archive.files)) or 'nothing'}{hint}.")
    try:
        array = archive[name] if _fills_its_member(archive.zip, name) else None
    except UNREADABLE as error:
        raise InputError(f"{name} in {path} cannot be read ({first_line(error)}); save it again.") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
        words = "integers or floats" if kinds == NUMBERS else "numbers or text"
        raise InputError(f"{name} in {path} is not an array of {words}; save it as one.")
    if array.dtype.kind == "U" and not _is_text(array):
        raise InputError(f"{name} in {path} has characters that do not exist; save it again.")
    return array


def _is_text(array: NDArray[Any]) -> bool:
    """Whether every character is one: numpy takes any 32 bits for one until the string is made."""
    codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    return int(codes.max(initial=0)) <= sys.maxunicode


def _fills_its_member(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether the archive has an array of that name; ValueError where its header and its size disagree."""
    if f"{name}.npy" not in archive.namelist():
        return False
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = read_header(file)
        needed, found = math.prod(shape) * dtype.itemsize, archive.getinfo(f"{name}.npy").file_size - file.tell()
    if needed != found and not dtype.hasobject:  # objects are pickled, which numpy refuses next
        raise ValueError(f"its header needs {needed} bytes and it has {found}")
    return True

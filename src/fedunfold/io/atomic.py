"""Writing files so that none is ever seen half-written, locking folders so that one process at a time writes there, and
reading small files within limits."""

import contextlib
import errno
import json
import os
import re
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedunfold.core.errors import InputError, WriteError
from fedunfold.io.limits import NAME_PARTS, RECORD_BYTES, Limit

if sys.platform != "win32":
    import fcntl

_LEFT_OVER = "-partial-"
_TEMPORARY = re.compile(rf"{_LEFT_OVER}[a-z0-9_]{{8}}(\.[^.]*)?$")  # as tempfile names them
PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""


def write_atomically(path: Path, write: Callable[[Path], object], *, previous: Path | None = None) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    The content is on the disk before the name is, and the name before this returns: a machine that stops at any
    moment leaves the old file or the new one.

    Args:
        path: The file; folders above it are made.
        write: Fills the file whose path it is given.
        previous: Where the old file is moved to; without it, the old file is replaced.

    Raises:
        WriteError: Where something cannot be written; the old file is still whole.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}{_LEFT_OVER}", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o644)
            _to_disk(temporary)
            if previous is not None and path.exists():
                path.replace(previous)
            temporary.replace(path)
            if sys.platform != "win32":  # which cannot open a folder
                _to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except WriteError:  # of another file, within `write`
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, and run it again" if full else "choose a folder you can write to"
        raise WriteError(f"cannot write {path}: {error.strerror or error}; {remedy}.") from error


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale_temp_files(folder: Path, *inner: str) -> None:
    """Delete what killed processes left half-written in a folder, and at any depth in the `inner` ones; only for who
    holds the folder's lock."""
    pattern = f".*{_LEFT_OVER}*"
    for file in [*folder.glob(pattern), *(file for name in inner for file in (folder / name).rglob(pattern))]:
        if _TEMPORARY.search(file.name) and file.is_file():
            file.unlink(missing_ok=True)


class InUseError(InputError):
    """Another process holds the lock of a folder."""


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """One process at a time writes to a folder.

    The lock is on the folder itself and lives as long as the process: there is no file that a killed process could
    leave behind. Windows has no such lock, and there nothing is locked. (filelock locks a file, which would stay in
    every run's folder, and a folder it cannot lock.)

    Args:
        folder: The folder, which exists.

    Raises:
        InUseError: Where another process holds the lock.
        WriteError: Where the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        if sys.platform == "win32":
            return
        try:
            self._handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InUseError(
                f"another process is writing to {folder}; wait until it has ended, or choose another `out`."
            ) from None
        except OSError as error:
            self.release()
            raise WriteError(f"cannot lock {folder}: {error.strerror}; choose a folder on another disk.") from error

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):  # released all the same
                os.close(self._handle)
            self._handle = None


def size_of(path: Path) -> int:
    """The size of a plain file.

    Args:
        path: The file.

    Returns:
        Its bytes.

    Raises:
        InputError: Where it is a pipe or a device, which may have no end, or its name cannot be one.
        OSError: Where there is nothing.
    """
    try:
        found = path.stat()
    except ValueError as error:  # a zero byte
        raise InputError(f"{path} cannot be the name of a file; correct it.") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path} is not a plain file; check the path.")
    return found.st_size


def is_plain_file(path: Path) -> bool:
    """Whether there is one; also of a name that no file can have."""
    try:
        return size_of(path) >= 0
    except (OSError, InputError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is one; also of a name that no folder can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_text(path: Path, limit: Limit = RECORD_BYTES) -> str:
    """The whole of a UTF-8 file.

    Args:
        path: The file.
        limit: How large it may be.

    Returns:
        The text.

    Raises:
        InputError: Where it is too large, or not UTF-8.
        OSError: Where it cannot be opened.
    """
    limit.check(size_of(path), f"{path}: ")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it so.") from error


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document.

    Args:
        text: The document; its dotted names have few parts, with the square of which tomllib's work grows.

    Returns:
        Its tables.

    Raises:
        InputError: Where it is none; the message is the end of a sentence that begins with the file.
    """
    if found := re.search(rf"(?:{PART}\.[ \t]*){{{NAME_PARTS.value}}}", text):
        NAME_PARTS.check(NAME_PARTS.value + 1, f"has too long a dotted name ({found[0][:20]}…): ")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InputError(f"is not valid TOML: {error}") from error


def read_json(path: Path) -> Any:
    """The JSON document in a small file.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        InputError: Where it is too large, or no JSON.
        OSError: Where it cannot be opened.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from error

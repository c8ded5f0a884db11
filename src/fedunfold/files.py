"""Writing files so that none is ever seen half-written, and folders so that one process at a time does."""

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedunfold.errors import InputError, WriteError

if sys.platform != "win32":
    import fcntl

_LEFT_OVER = "-partial-"


def write_atomically(path: Path, write: Callable[[Path], object], *, previous: Path | None = None) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    The content is on the disk before the name is, and the name before this returns: a machine that stops at any
    moment leaves the old file or the new one. With `previous`, the old one stays there.
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
    except OSError as error:
        raise _told(error, path) from error


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _told(error: OSError, path: Path) -> WriteError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space, and run the same command again" if full else "choose a folder you can write to"
    return WriteError(f"cannot write {path}: {error.strerror or error}; {remedy}.")


def remove_left_overs(folder: Path) -> None:
    """Delete what writers that were killed left half-written; only for who holds the folder's lock."""
    for file in folder.rglob(f".*{_LEFT_OVER}*"):
        file.unlink(missing_ok=True)


class InUseError(InputError):
    """Another process holds the lock of a folder."""


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """One process at a time writes to a folder.

    The lock is on the folder itself and lives as long as the process: there is no file that a killed process could
    leave behind. Windows has no such lock, and there nothing is locked.
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
                f"another process is writing to {folder}; wait until it has ended, or choose another --out."
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

"""Writing files so that none is ever seen half-written, and reading small ones within limits."""

import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedunfold.errors import InputError
from fedunfold.limits import RECORD_BYTES, Limit

NAME_PARTS = 16
PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
LONG_NAME = re.compile(rf"(?:{PART}\.[ \t]*){{{NAME_PARTS}}}")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {path}: {reason}; choose a folder you can write to.") from error


def size_of(path: Path) -> int:
    """Bytes of a plain file; a pipe or a device, which may have no end, is refused. OSError where there is nothing."""
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


def read_text(path: Path, limit: Limit = RECORD_BYTES) -> str:
    """The whole of a UTF-8 file. OSError where it cannot be opened, InputError where it is not one or too large."""
    limit.check(size_of(path), f"{path}: ")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it so.") from error


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document. tomllib's work grows with the square of the parts of a dotted name, and so they are few."""
    if LONG_NAME.search(text):
        raise InputError(f"has a dotted name of more than {NAME_PARTS} parts; shorten it")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InputError(f"is not valid TOML: {error}") from error


def read_json(path: Path) -> Any:
    """The document in a small file. OSError where it cannot be opened."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from error

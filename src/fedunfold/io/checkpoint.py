"""Where long work stands, in files that a later call resumes from.

A checkpoint is a safetensors file whose metadata say of what it is and in which format. The one before it stays beside
it. Each holds a checksum of itself: the SHA-256 of the file with zeros in the place of the checksum. So damage is
noticed, and the one before is taken. Small results are saved the same way as JSON records.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import size_of, write_atomically
from fedunfold.io.limits import RECORD_BYTES, Limit
from fedunfold.io.safetensors import UNREADABLE

FORMAT = 1
CHECKPOINT_SECONDS = 5.0
"""How much work a crash may cost; writing more often would cost it without one."""

NO_CHECKSUM = "0" * 64
_CHECKSUM = re.compile(rb"checksum\W{1,8}([0-9a-f]{64})")

SPACING = 10
"""Times as long as saving took until it is saved again."""

log = logging.getLogger(__name__)
Tensors = Mapping[str, Tensor]
Found = TypeVar("Found")


class DamagedError(InputError):
    """A file is not what was written to it."""


def embed_checksum(content: bytes) -> bytes:
    """The content, in which the first checksum is `NO_CHECKSUM`, with its checksum in that place."""
    return content.replace(NO_CHECKSUM.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def verify_checksum(content: bytes) -> bool:
    """Whether the content is what `embed_checksum` made."""
    found = _CHECKSUM.search(content)
    if found is None:
        return False
    without = content[: found.start(1)] + NO_CHECKSUM.encode() + content[found.end(1) :]
    return hashlib.sha256(without).hexdigest().encode() == found[1]


class Checkpoint:
    """The file `path` and the one before it, of the work that `identity` describes.

    Args:
        path: The newest file; the one before it has the same name with "-before".
        kind: What the work is called in messages, such as "run".
        identity: JSON values that are the same where the same work is resumed.
        seconds: How long after it was written it is to be saved again (`should_save`); by default `CHECKPOINT_SECONDS`.
    """

    def __init__(self, path: Path, kind: str, identity: Mapping[str, Any], seconds: float | None = None) -> None:
        self.path = path
        self.before = _before(path)
        self._kind = kind
        self._identity = json.loads(json.dumps(identity))
        self._seconds = CHECKPOINT_SECONDS if seconds is None else seconds
        self._written, self._took = time.monotonic(), 0.0

    @property
    def should_save(self) -> bool:
        """Whether it is time to: the larger the file, the longer between two, so that saving takes a tenth of the time
        at most. Where it is saved after every round, it always is."""
        spacing = max(self._seconds, SPACING * self._took) if self._seconds else 0.0
        return time.monotonic() - self._written >= spacing

    def save(self, tensors: Tensors, about: object = None) -> None:
        """Write where the work stands; the newest file until now becomes the one before."""
        began = time.monotonic()
        # One metadata entry: several would come out in an order that changes from process to process.
        header = {"checksum": NO_CHECKSUM, "format": FORMAT, "identity": self._identity, "about": about}
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = embed_checksum(serialize(plain, {"fedunfold": json.dumps(header)}))
        write_atomically(self.path, lambda temporary: temporary.write_bytes(content), previous=self.before)
        self._written = time.monotonic()
        self._took = self._written - began

    def load(self, parse: Callable[[Tensors, Any], Found]) -> Found | None:
        """Read the newest file that is whole.

        A damaged newest file is deleted, so that it never becomes the one before.

        Args:
            parse: Makes the result of the tensors and of what `save` got as `about`.

        Returns:
            What `parse` returned; None where there is no file.

        Raises:
            InputError: Where the file is of another work or of another format, or both files are damaged.
        """
        damaged: list[Path] = []
        for file in (self.path, self.before):
            if not file.exists():
                continue
            try:
                found = self._read(file, parse)
            except DamagedError:
                damaged.append(file)
                continue
            for other in damaged:
                log.warning("checkpoint %s is damaged; resuming from the one before it, %s.", other, file.name)
                other.unlink(missing_ok=True)
            return found
        if damaged:
            files = " and ".join(map(str, damaged))
            raise InputError(f"checkpoint {files} is damaged; delete it to begin the {self._kind} again.")
        return None

    def _read(self, file: Path, parse: Callable[[Tensors, Any], Found]) -> Found:
        content = _content(file)
        version, identity, about = _header(file, content)
        if version != FORMAT:
            raise InputError(_other_format(f"checkpoint {file}", version))
        if difference := first_difference(identity, self._identity):
            raise InputError(
                f"checkpoint {file} is of another {self._kind} ({difference}); delete it, or choose another file."
            )
        try:
            return parse(deserialize(content), about)
        except UNREADABLE as error:
            raise DamagedError(f"checkpoint {file} is damaged.") from error


def stored_identity(path: Path) -> Any:
    """Of what work the newest whole file of a checkpoint is; None where there is no such file."""
    for file in filter(Path.exists, (path, _before(path))):
        try:
            return _header(file, _content(file))[1]
        except DamagedError:  # loading it says so
            continue
    return None


def _header(file: Path, content: bytes) -> tuple[Any, Any, Any]:
    """The format, the identity and what else was saved beside the tensors."""
    try:
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(json.loads(content[8:end])["__metadata__"]["fedunfold"])
        return header["format"], header["identity"], header["about"]
    except UNREADABLE as error:
        raise DamagedError(f"checkpoint {file} is damaged.") from error


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint that is no longer needed, and the one before it."""
    for file in (path, _before(path)):
        file.unlink(missing_ok=True)


def _before(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-before")


def write_record(file: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON document with its checksum, whole or not at all.

    Args:
        file: The file.
        content: The document.
        indent: As of `json.dumps`.
    """
    text = json.dumps({"checksum": NO_CHECKSUM, "format": FORMAT, **content}, indent=indent) + "\n"
    write_atomically(file, lambda temporary: temporary.write_bytes(embed_checksum(text.encode())))


def read_record(file: Path, names: Set[str]) -> dict[str, Any]:
    """Read what `write_record` wrote.

    Args:
        file: The file.
        names: What must be in it.

    Returns:
        The document.

    Raises:
        DamagedError: Where the file is not what was written.
        InputError: Where it is of another format.
    """
    content = _content(file, RECORD_BYTES)
    try:
        found: dict[str, Any] = json.loads(content)
        missing = sorted({"format", *names} - found.keys())
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"record {file} is damaged ({error}); delete it and run again.") from error
    if missing:
        raise DamagedError(f"record {file} is damaged (it has no '{missing[0]}'); delete it and run again.")
    if found["format"] != FORMAT:
        raise InputError(_other_format(f"record {file}", found["format"]))
    return {name: value for name, value in found.items() if name not in ("checksum", "format")}


def _content(file: Path, limit: Limit | None = None) -> bytes:
    try:
        size = size_of(file)  # refuses what has no end
        if limit is not None:
            limit.check(size, f"{file}: ")
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; fix that, and run it again.") from error
    if not verify_checksum(content):
        raise DamagedError(f"{file} is damaged (its checksum does not hold); delete it and run again.")
    return content


def _other_format(what: str, version: object) -> str:
    return (
        f"{what} has format {version!r} and this version of fedunfold reads {FORMAT}; resume with the version that "
        "wrote it, or delete it to begin again."
    )


def first_difference(before: object, now: object, name: str = "") -> str | None:
    """The first thing in which two JSON values differ, as "a.b was 1 and is 2"; None where they are equal.

    >>> first_difference({"learning": {"lr": 0.1}}, {"learning": {"lr": 0.3}})
    'learning.lr was 0.1 and is 0.3'
    """
    if isinstance(before, dict) and isinstance(now, dict):
        prefix = f"{name}." if name else ""
        parts = [(before.get(key), now.get(key), f"{prefix}{key}") for key in before | now]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [(before[i], now[i], f"{name}[{i}]") for i in range(len(now))]
    else:
        return None if before == now else f"{name} was {_short(before)} and is {_short(now)}"
    return next(filter(None, (first_difference(*part) for part in parts)), None)


def _short(value: object) -> str:
    """A value in a sentence: digests and long lists by their beginning."""
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"

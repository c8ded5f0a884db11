"""What counts as an answer to bytes of anybody's making."""

import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from fedunfold.core.errors import FedunfoldError
from fedunfold.io.checkpoint import NO_CHECKSUM, embed_checksum


def understood(call: Callable[[], object], *named: str) -> bool:
    """Whether a call gives something. A refusal is one line that has one of the names in it; all else is raised."""
    try:
        call()
    except FedunfoldError as error:
        message = str(error)
        assert message, "a refusal without a word"
        assert message.isprintable(), f"not one line: {message!r}"
        assert any(name in message for name in named), f"names none of {named}: {message}"
        cause: BaseException | None = error
        while cause is not None:
            assert not isinstance(cause, MemoryError), f"ran out of memory before it refused: {message}"
            cause = cause.__cause__ or cause.__context__
        return False
    return True


def understood_by_any(calls: Iterable[Callable[[], object]], *named: str) -> bool:
    """Whether one of several readers gives something; all of them are tried."""
    return sum(understood(call, *named) for call in calls) > 0


@cache
def scratch() -> Path:
    """This process's own folder; the system clears it away."""
    return Path(tempfile.mkdtemp(prefix="fedunfold-fuzz-"))


def written(name: str, data: bytes) -> Path:
    """The data as a file."""
    path = scratch() / name
    path.write_bytes(data)
    return path


def resealed(data: bytes) -> bytes:
    """The content with a checksum that holds, so that what lies behind the checksum is read too."""
    seal = re.search(rb"checksum\W{1,8}([0-9a-f]{64})", data)
    return data if seal is None else embed_checksum(data.replace(seal[1], NO_CHECKSUM.encode(), 1))

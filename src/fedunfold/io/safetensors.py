"""Reading .safetensors files: nothing in them is executed, and no oversized header is parsed."""

from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import size_of
from fedunfold.io.limits import HEADER_BYTES

UNREADABLE = (
    SafetensorError,
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    RuntimeError,
)
"""What opening a file, its tensors and its metadata raises where somebody else made them: torch and numpy have types
that the other lacks, JSON can be anything."""


def read_tensors(path: Path, framework: Literal["pt", "numpy"]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file; shapes and offsets are checked against it before a tensor is made.

    Args:
        path: The file.
        framework: Whose tensors they become: "pt" or "numpy".

    Returns:
        The tensors and the metadata.

    Raises:
        InputError: Where the file is cut short, or its header too large.
    """
    size = size_of(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > size - 8:
        raise InputError(f"{path} is cut short or no .safetensors file; make it again.")
    HEADER_BYTES.check(header, f"{path}: ")
    with safe_open(path, framework=framework) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118

"""A pre-trained rule as one safetensors file: φ and its ranges in single precision, and a header on what it is."""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Settings
from fedunfold.io.atomic import is_plain_file, size_of, write_atomically
from fedunfold.io.checkpoint import NO_CHECKSUM, DamagedError, embed_checksum, verify_checksum
from fedunfold.io.limits import RULE_BYTES, LimitError
from fedunfold.io.safetensors import UNREADABLE, read_tensors
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.features import OF_CLIENTS, OF_ROUND, needs_of
from fedunfold.rules.parametric import ParametricRule
from fedunfold.version import VERSION

FORMAT = 1
RANGES = "ranges"
PREFIX = "params."


class Header(Settings):
    """What a file holds beside its tensors; the checksum is that of `io.checkpoint`.

    Attributes:
        checksum: Of the file.
        format: Of the header and the tensors.
        kind: The rule's family.
        name: The rule's name.
        description: What it is.
        client_features: What it reads of a client, in this order.
        round_features: What it reads of a round.
        algorithm: What it is for, in plain values.
        version: Of the package that wrote the file.
    """

    checksum: str
    format: Count
    kind: Family
    name: str = Field(min_length=1, max_length=100)
    description: str = Field(max_length=2000)
    client_features: tuple[str, ...]
    round_features: tuple[str, ...]
    algorithm: dict[str, Any]
    version: str


def save_rule(rule: ParametricRule, path: str | Path) -> None:
    """Write a file; the same rule gives the same bytes.

    Args:
        rule: A rule that knows what it is for, and its ranges.
        path: The file.

    Raises:
        InputError: It does not know, or is none of the kinds that have files.
    """
    if rule.algorithm is None or rule.ranges is None:
        raise InputError(f"rule '{rule.name}' has no algorithm or no ranges; give it both before it is saved.")
    kind = next((name for name, family in FAMILIES.items() if type(rule) is family), None)
    if kind is None:
        raise InputError(f"a rule of the type {type(rule).__name__} has no file; save one of {', '.join(FAMILIES)}.")
    header = {
        "checksum": NO_CHECKSUM,
        "format": FORMAT,
        "kind": kind,
        "name": rule.name,
        "description": rule.description,
        "client_features": rule.client_features,
        "round_features": rule.round_features,
        "algorithm": rule.algorithm.describe(),
        "version": VERSION,
    }
    named = {f"{PREFIX}{name}": value for name, value in rule.params.items()} | {RANGES: rule.ranges}
    tensors = {name: value.detach().float().contiguous() for name, value in named.items()}
    # One metadata entry: several would come out in an order that changes from process to process.
    content = embed_checksum(serialize(tensors, {"fedunfold": json.dumps(header, sort_keys=True)}))
    write_atomically(Path(path), lambda temporary: temporary.write_bytes(content))


def load_rule(path: str | Path) -> ParametricRule:
    """Read what `save_rule` wrote; nothing in the file is executed.

    Args:
        path: The file.

    Returns:
        The rule, in double precision.

    Raises:
        InputError: There is no such file, it is damaged or of something else, or this version cannot use it.
    """
    path = Path(path)
    if not is_plain_file(path):
        raise InputError(f"there is no rule file {path}; check the path.")
    RULE_BYTES.check(size_of(path), f"{path}: ")
    try:
        tensors, metadata = read_tensors(path, "pt")
        described = json.loads(metadata["fedunfold"])
        if described["format"] != FORMAT and "kind" in described:
            raise _OtherFormatError(described["format"])
        header = Header(**described)
        if not verify_checksum(path.read_bytes()):
            raise ValueError("its checksum does not hold")
        params = {name.removeprefix(PREFIX): _numbers(tensors[name]) for name in sorted(tensors) if name != RANGES}
        ranges, algorithm = _numbers(tensors[RANGES]), Algorithm.from_description(header.algorithm)
    except LimitError:
        raise  # too large is not damaged
    except _OtherFormatError as error:
        raise InputError(f"rule file {path} has format {error}; this version reads {FORMAT}.") from error
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
        raise DamagedError(
            f"rule file {path} is damaged or not one of fedunfold's ({reason}); get or pre-train the rule again."
        ) from error
    _check(header, params, ranges, path)
    of = FAMILIES[header.kind]
    return of(
        params,
        ranges=ranges,
        name=header.name,
        algorithm=algorithm,
        description=header.description,
        client_features=header.client_features,
        round_features=header.round_features,
    )


def is_rule_file(path: Path) -> bool:
    """Whether a file says that it is one, damaged or not."""
    try:
        RULE_BYTES.check(size_of(path))
        return "kind" in json.loads(read_tensors(path, "pt")[1]["fedunfold"])
    except (InputError, *UNREADABLE):
        return False


class _OtherFormatError(Exception):
    """The file is of a format that this version does not read."""


def _check(header: Header, params: dict[str, Tensor], ranges: Tensor, path: Path) -> None:
    family = FAMILIES[header.kind]
    read = header.client_features, header.round_features
    for names, known in zip(read, (set(OF_CLIENTS), set(OF_ROUND)), strict=True):
        if unknown := [name for name in names if name not in known]:
            raise InputError(
                f"rule file {path} reads the feature '{unknown[0]}', which this version ({VERSION}) does not compute; "
                f"use the version of fedunfold that wrote it ({header.version})."
            )
    if not all(read) or needs_of(*read) & family.unknown:
        raise InputError(f"rule file {path} is inconsistent: a rule of the kind '{header.kind}' reads other features.")
    if not header.name.isprintable():
        raise InputError(f"rule file {path} is inconsistent: its name is {header.name!r}.")
    width = max((value.shape[0] if value.dim() else 0 for value in params.values()), default=0)
    expected = family.shapes(width, *read)
    if {name: tuple(value.shape) for name, value in params.items()} != expected:
        raise InputError(f"rule file {path} is inconsistent: its parameters have other names or shapes than a rule's.")
    if ranges.shape != (2, len(read[0]) + len(read[1])) or bool((ranges[0] > ranges[1]).any()):
        raise InputError(f"rule file {path} is inconsistent: its ranges are not one for each feature.")
    if not all(bool(value.isfinite().all()) for value in (*params.values(), ranges)):
        raise InputError(f"rule file {path} is inconsistent: it has numbers that are not finite.")


def _numbers(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        raise ValueError(f"expected numbers in single precision, not {tensor.dtype}")
    return tensor.double()

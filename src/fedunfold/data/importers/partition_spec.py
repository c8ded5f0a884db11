"""How undivided data are dealt to clients, by short descriptions such as ``dirichlet:alpha=0.3``."""

from dataclasses import dataclass
from typing import Any

from fedunfold.core.errors import InputError


@dataclass(frozen=True)
class PartitionSpec:
    """A kind and its one option, if it has any; `column` where the data name the clients themselves."""

    kind: str
    option: str = ""
    value: Any = None


# kind: (option, its type), as flwr-datasets has them
KINDS: dict[str, tuple[str, type] | None] = {
    "iid": None,
    "dirichlet": ("alpha", float),
    "shard": ("shards", int),
    "pathological": ("classes", int),
    "linear": None,
    "exponential": None,
    "natural": ("column", str),
}


def dealing(text: str) -> PartitionSpec:
    """Read ``kind`` or ``kind:option=value``.

    >>> dealing("dirichlet:alpha=0.3")
    PartitionSpec(kind='dirichlet', option='alpha', value=0.3)
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise InputError(f"--partitioner: there is no {kind!r}; choose one of {', '.join(map(described, KINDS))}.")
    wanted = KINDS[kind]
    if wanted is None:
        if rest:
            raise InputError(f"--partitioner: {kind} takes no option, so leave out {rest!r}.")
        return PartitionSpec(kind)
    option, type_ = wanted
    name, _, value = rest.partition("=")
    try:
        if name != option or not value:
            raise ValueError
        return PartitionSpec(kind, option, type_(value))
    except ValueError:
        raise InputError(f"--partitioner: {text!r} is not understood; write {described(kind)}.") from None


def described(kind: str) -> str:
    """The kind as it is written, with an example of its option."""
    wanted = KINDS[kind]
    example = {float: "0.3", int: "2", str: "NAME"}
    return kind if wanted is None else f"{kind}:{wanted[0]}={example[wanted[1]]}"

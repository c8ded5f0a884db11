"""How a data set is partitioned over clients, by short descriptions such as ``dirichlet:alpha=0.3``."""

from dataclasses import dataclass
from typing import Any

from fedunfold.core.errors import InputError

# kind: (option, its type, an example), as flwr-datasets has them
KINDS: dict[str, tuple[str, type, str] | None] = {
    "iid": None,
    "dirichlet": ("alpha", float, "0.3"),
    "shard": ("shards", int, "2"),
    "pathological": ("classes", int, "2"),
    "linear": None,
    "exponential": None,
    "natural": ("column", str, "NAME"),
}


@dataclass(frozen=True)
class PartitionSpec:
    """A partitioner and its option.

    Attributes:
        kind: One of `KINDS`; "natural" where a column of the data names the clients.
        option: The name of its option, if it has one.
        value: The option's value.
    """

    kind: str
    option: str = ""
    value: Any = None

    @classmethod
    def parse(cls, text: str) -> "PartitionSpec":
        """Read ``kind`` or ``kind:option=value``.

        >>> PartitionSpec.parse("dirichlet:alpha=0.3")
        PartitionSpec(kind='dirichlet', option='alpha', value=0.3)
        """
        kind, _, rest = text.partition(":")
        if kind not in KINDS:
            raise InputError(f"`partitioner`: there is no {kind!r}; choose one of {', '.join(map(_example, KINDS))}.")
        wanted = KINDS[kind]
        if wanted is None:
            if rest:
                raise InputError(f"`partitioner`: {kind} takes no option, so leave out {rest!r}.")
            return cls(kind)
        option, read, _ = wanted
        name, _, value = rest.partition("=")
        try:
            if name != option or not value:
                raise ValueError
            return cls(kind, option, read(value))
        except ValueError:
            raise InputError(f"`partitioner`: {text!r} is not understood; write {_example(kind)}.") from None


def _example(kind: str) -> str:
    """The kind as it is written, with an example of its option."""
    wanted = KINDS[kind]
    return kind if wanted is None else f"{kind}:{wanted[0]}={wanted[2]}"

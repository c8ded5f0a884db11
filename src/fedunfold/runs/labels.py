"""Names that come from a run folder, made fit to be shown."""

from collections.abc import Sequence
from itertools import chain, count

LONGEST = 80


def plain(text: str) -> str:
    """One line of printable characters, no longer than a label can be.

    >>> plain("site\\u202e-a\\n")
    'site\N{REPLACEMENT CHARACTER}-a\N{REPLACEMENT CHARACTER}'
    """
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def distinct(labels: Sequence[str]) -> tuple[str, ...]:
    """The same labels, numbered where one is repeated: a chart would take them for one.

    >>> distinct(["a", "b", "a"])
    ('a', 'b', 'a (2)')
    """
    found: dict[str, None] = {}
    for label in labels:
        numbered = chain([label], (f"{label} ({number})" for number in count(2)))
        found[next(name for name in numbered if name not in found)] = None
    return tuple(found)

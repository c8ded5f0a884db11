"""The clients of an environment."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from fedunfold.core.settings import Settings, shown
from fedunfold.io.limits import CLIENTS, EPOCHS

KEY = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _valid_epochs(value: Any) -> int | tuple[int, ...]:
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries or any(type(entry) is not int or entry < 1 for entry in entries):
        raise ValueError(f"must be an integer of at least 1, or one for each round, got {shown(value)}")
    EPOCHS.check(max(entries))
    return tuple(entries) if isinstance(value, list | tuple) else entries[0]


Epochs = Annotated[
    int | tuple[int, ...],
    PlainValidator(_valid_epochs),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value),
]


def _readable(key: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or underscores, got {key!r}")
    return key


class Client(Settings):
    """One participant of a federation.

    Attributes:
        key: Its name: letters, digits, dots, dashes and underscores.
        epochs: Epochs of local training in a round; one number, or one for each round.
        participation_probability: How likely it takes part in a round.

    >>> Client(key="hospital-a", epochs=2, participation_probability=0.9)
    Client(key='hospital-a', epochs=2, participation_probability=0.9)
    """

    key: Annotated[str, AfterValidator(_readable)]
    epochs: Epochs = 1
    participation_probability: float = Field(default=1.0, ge=0, le=1)


def expand_counts(clients: Any) -> Any:
    """Replace every table with ``count = n`` by n clients key-0 … key-(n−1).

    Args:
        clients: The clients of a file or a program, not yet validated.

    Returns:
        The same without counts.
    """
    if not isinstance(clients, list | tuple):
        return clients
    expanded: list[Any] = []
    for position, entry in enumerate(clients):
        if not (isinstance(entry, Mapping) and "count" in entry):
            expanded.append(entry)
            continue
        rest = {name: value for name, value in entry.items() if name != "count"}
        count = entry["count"]
        if type(count) is not int or count < 1:
            raise ValueError(f"entry {position}: count must be an integer of at least 1, got {shown(count)}")
        CLIENTS.check(len(expanded) + count, f"entry {position}: ")
        expanded.extend(rest | {"key": f"{rest.get('key', 'client')}-{i}"} for i in range(count))
    return expanded

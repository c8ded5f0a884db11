"""Fields of an environment that have rules of their own: its clients, its name, its task."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer, PlainValidator

from fedunfold.core.messages import Metric
from fedunfold.core.parts import CLIENT_SAMPLERS
from fedunfold.core.settings import Count, Settings, shown
from fedunfold.core.task import TASKS, Task
from fedunfold.io.limits import BATCH, CLIENTS, EPOCHS, ROUNDS


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"must be one line that can be printed, got {shown(name)}")
    return name


def _known_sampler(name: str) -> str:
    sampler = CLIENT_SAMPLERS.parse(name)
    numbers = [metric for metric in get_args(Metric) if metric != "gradients"]
    if strange := sorted(sampler.required_metrics.difference(numbers)):
        raise ValueError(
            f"client sampler '{sampler.name}' requires '{strange[0]}', which is no number that clients report; "
            f"choose among {', '.join(numbers)}"
        )
    return name


def _as_task(given: object) -> object:
    """A task that is described by its name and settings."""
    if isinstance(given, str):
        return TASKS.make(given)
    if isinstance(given, Mapping):
        settings = {str(key): value for key, value in given.items()}
        if not isinstance(name := settings.pop("name", None), str):
            raise ValueError(f"needs a name, one of {', '.join(TASKS.names())}")
        return TASKS.make(name, **settings)
    return given


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
SamplerName = Annotated[str, AfterValidator(_known_sampler)]
TaskField = Annotated[InstanceOf[Task], BeforeValidator(_as_task), PlainSerializer(lambda task: task.describe())]
Rounds = Annotated[Count, AfterValidator(ROUNDS.check)]
BatchSize = Annotated[Count, AfterValidator(BATCH.check)]


class OuterSchedule(Settings):
    """The outer schedule that a publication states for an environment.

    Attributes:
        iterations: Outer iterations M.
        lr: Adam's step size.
    """

    iterations: Count
    lr: float = Field(gt=0, lt=1)


KEY = re.compile(r"[\w.-]{1,64}")  # letters of any language


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
    key = unicodedata.normalize("NFC", key)  # ü may be written as one sign or as two
    if not KEY.fullmatch(key):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or underscores, got {key!r}")
    return key


Key = Annotated[str, AfterValidator(_readable)]


class Client(Settings):
    """One participant of a federation.

    Attributes:
        key: Its name: letters, digits, dots, dashes and underscores.
        epochs: Epochs of local training in a round; one number, or one for each round.
        participation_probability: How likely it takes part in a round.

    >>> Client(key="hospital-a", epochs=2, participation_probability=0.9)
    Client(key='hospital-a', epochs=2, participation_probability=0.9)
    """

    key: Key
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

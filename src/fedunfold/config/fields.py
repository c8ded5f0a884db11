"""Fields of an environment that have rules of their own."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer

from fedunfold.core.parts import CLIENT_SAMPLERS
from fedunfold.core.settings import Count, Settings, shown
from fedunfold.core.task import TASKS, Task
from fedunfold.io.limits import BATCH, ROUNDS


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"must be one line that can be printed, got {shown(name)}")
    return name


def _known_sampler(name: str) -> str:
    CLIENT_SAMPLERS.parse(name)
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

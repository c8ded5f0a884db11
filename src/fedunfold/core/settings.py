"""The base of all validated settings, and how wrong ones are reported."""

import reprlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedunfold.core.errors import InputError

LARGEST = 2**63 - 1  # what TOML, Flower's records and numpy take for a whole number
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Natural = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1; 2.0 and "2" are not."""
    return isinstance(value, int) and value >= 1


def explain(error: ValidationError, prefix: str = "") -> InputError:
    """pydantic's report as one line.

    Args:
        error: The report.
        prefix: What the line begins with.

    Returns:
        An error that names the first field that is wrong, how, and how many more are.
    """
    errors = error.errors()
    path, message = _locate(errors[0])
    field = f"field {'.'.join(path)}: " if path else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    result = InputError(f"{prefix}{field}{message}{more}")
    result.__cause__ = error
    return result


def _locate(details: Any) -> tuple[list[str], str]:
    """(path of the field, what is wrong with it) for one pydantic error."""
    path = [str(part) for part in details["loc"]]
    if path[:1] in (["data"], ["model"], ["partition"]):
        del path[1:2]  # pydantic adds the chosen variant's tag, which is no field of the file
    context = details.get("ctx", {})
    inner = context.get("error")
    if isinstance(inner, InputError) and isinstance(inner.__cause__, ValidationError):
        inner_path, message = _locate(inner.__cause__.errors()[0])
        return path + inner_path, message
    got = f", got {shown(details['input'])}"
    match details["type"]:
        case "missing":
            return path, "is missing"
        case "extra_forbidden":
            return path, "is not a known field; remove it or correct its name"
        case "union_tag_invalid":
            choices = context["expected_tags"]
            return path, f"{context['discriminator']} must be one of {choices}, not {context['tag']!r}"
        case "union_tag_not_found":
            return path, f"needs {context['discriminator']}"
        case "greater_than_equal":
            return path, f"must be at least {context['ge']:g}{got}"
        case "less_than_equal":
            return path, f"must be at most {context['le']:g}{got}"
        case "greater_than":
            return path, f"must be more than {context['gt']:g}{got}"
        case "value_error":
            return path, str(inner)
        case _:
            return path, details["msg"].replace("Input should be", "must be") + got


def shown(value: object) -> str:
    """A wrong value, short enough for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number of thousands of digits"


class Settings(BaseModel):
    """Frozen, without unknown fields; a wrong value is an InputError of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, f"{type(self).__name__}: ") from error

"""Commands read off functions: an option for each parameter, with the help that the docstring has for it."""

import inspect
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

Function = TypeVar("Function", bound=Callable[..., None])


class CommandGroup(typer.Typer):
    """Commands that are functions with documented arguments.

    A parameter without a default is an argument of the command, any other one an option of its name, and a dataclass
    stands for all of its fields. The help is what the docstring's `Args:` say, for fields the `Attributes:`. What typer
    has to know beside that, such as a metavar, is an annotation.

    Args:
        help: What the commands do.
        settings: As of `typer.Typer`.
    """

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode="rich", help=help, **settings)

    def example(self, line: str) -> Callable[[Function], Function]:
        """Add the function that is decorated, under its name, with an example at the end of its help."""

        def add(function: Function) -> Function:
            self.command(function.__name__.strip("_"), epilog=f"Example: {line}")(_command(function))
            return function

        return add


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads one."""
    groups: dict[str, Any] = {name: hint for name, hint in get_type_hints(function).items() if is_dataclass(hint)}

    @wraps(function)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{option.name: arguments.pop(option.name) for option in fields(group)})
        function(**arguments)

    parameters = list(_parameters(function))
    run.__doc__ = _documented(function)[0]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(of: Any) -> Iterator[inspect.Parameter]:
    """Those of a function or dataclass, each with all that typer has to know about it."""
    hints, (_, texts) = get_type_hints(of, include_extras=True), _documented(of)
    for given in inspect.signature(of).parameters.values():
        hint = hints[given.name]
        if is_dataclass(hint):
            yield from _parameters(hint)
            continue
        if hint is not typer.Context:
            known = next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, ParameterInfo)), None)
            info = copy(known) or (typer.Argument() if given.default is given.empty else typer.Option())
            info.help = info.help or texts.get(given.name)
            if isinstance(info, OptionInfo) and info.default is ...:  # else it is a name of its own
                info.param_decls = (f"--{given.name.replace('_', '-')}",)
            hint = Annotated[hint if known is None else hint.__origin__, info]
        yield given.replace(kind=given.KEYWORD_ONLY, annotation=hint)


def _documented(of: Any) -> tuple[str, dict[str, str]]:
    """What a docstring says, and what about each argument or attribute."""
    about, _, listed = re.sub(r"\n(Args|Attributes):\n", "\0", inspect.getdoc(of) or "").partition("\0")
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", inspect.cleandoc(listed), re.MULTILINE)
    return about.strip(), {name: " ".join(text.split()) for name, text in entries}

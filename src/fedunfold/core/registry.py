"""Open sets of named parts: whoever adds one writes one file and registers it.

Seven kinds of parts can be added without touching this package:

| kind             | what it is                                             | entry-point group              |
|------------------|--------------------------------------------------------|--------------------------------|
| rule             | how much each client counts                            | fedunfold.rules                |
| server optimiser | what the server does with the mean update              | fedunfold.server_optimizers    |
| local optimiser  | how a client trains                                    | fedunfold.local_optimizers     |
| aggregator       | how updates become one direction                       | fedunfold.aggregators          |
| outer loss       | what weights are learned for                           | fedunfold.outer_losses         |
| client sampler   | who is sampled for a round                             | fedunfold.client_samplers      |
| task             | what a model is trained for                            | fedunfold.tasks                |

In this package a part registers itself by the decorator ``@RULES.register("size")`` on a function or class that makes
it. Another package names its factories in its pyproject.toml, and they are found when a name is first looked up::

    [project.entry-points."fedunfold.rules"]
    sqrt-size = "my_package:sqrt_size"

A part can then be named wherever the package's own can, with its settings: ``prox:mu=0.1``.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from fedunfold.core.errors import InputError

NEAR = 0.7
"""How alike two names are of which one may be a slip for the other: `nova` and `fednova` are, two methods are not."""
Made = TypeVar("Made")
Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry(Generic[Made]):
    """Factories of one kind of part, by name.

    Args:
        kind: What one is called in messages.
        group: The entry-point group that other packages use.
        home: The package of ours whose modules register themselves when it is imported.
    """

    def __init__(self, kind: str, group: str, home: str) -> None:
        self.kind, self.group, self.home = kind, group, home
        self._own: dict[str, Callable[..., Made]] = {}

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Decorate a function or class that makes a part."""

        def add(factory: Factory) -> Factory:
            if name in self._own:
                raise InputError(f"there are two {self.kind}s named '{name}'; give one of them another name.")
            self._own[name] = factory
            return factory

        return add

    def names(self) -> tuple[str, ...]:
        """Every name there is: this package's, then other packages'."""
        import_module(self.home)
        return (*self._own, *(name for name in _entry_points(self.group) if name not in self._own))

    def factory(self, name: str) -> Callable[..., Made]:
        """What makes the part of that name; this package's win over others'."""
        import_module(self.home)
        if name in self._own:
            return self._own[name]
        if name not in (found := _entry_points(self.group)):
            raise InputError(unknown(self.kind, name, self.names()))
        try:
            loaded: Callable[..., Made] = found[name].load()
        except Exception as error:  # another package's code, which may fail in any way
            raise InputError(
                f"{self.kind} '{name}' of the entry point {found[name].value} cannot be loaded: "
                f"{type(error).__name__}: {error}; fix or uninstall that package."
            ) from error
        return loaded

    def make(self, name: str, **settings: Any) -> Made:
        """The part of that name with these settings."""
        factory = self.factory(name)
        accepted = inspect.signature(factory).parameters
        if strangers := [setting for setting in settings if setting not in accepted]:
            raise InputError(f"{self.kind} '{name}' has no setting '{strangers[0]}'; it {_takes(accepted)}.")
        if missing := [key for key, given in accepted.items() if _is_required(given) and key not in settings]:
            raise InputError(f"{self.kind} '{name}' needs the setting '{missing[0]}'.")
        return factory(**settings)

    def parse(self, description: str) -> Made:
        """The part that ``name`` or ``name:key=value,key=value`` describes."""
        name, _, arguments = description.partition(":")
        accepted = inspect.signature(self.factory(name)).parameters
        settings: dict[str, float | str] = {}
        for argument in filter(None, arguments.split(",")):
            key, equals, value = argument.partition("=")
            if not equals or key not in accepted:
                raise InputError(
                    f"{self.kind} '{name}': cannot read '{argument}'; it {_takes(accepted)}, as {name}:key=value."
                )
            settings[key] = _value(value, accepted[key], description)
        return self.make(name, **settings)


def unknown(kind: str, name: str, known: Iterable[str], main: Iterable[str] = ()) -> str:
    """One line for a name nobody has, with the one that exists where it is near enough to be meant.

    Args:
        kind: What has a name.
        name: The one that nobody has.
        known: All there are.
        main: Those to choose from where none is near, of too many to be listed.
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(main or known)}."
    return f"unknown {kind} '{name}'; {hint}"


@cache
def _entry_points(group: str) -> Mapping[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=group)}


def _is_required(setting: inspect.Parameter) -> bool:
    collects = setting.kind in (setting.VAR_POSITIONAL, setting.VAR_KEYWORD)
    return setting.default is setting.empty and not collects


def _takes(accepted: Iterable[str]) -> str:
    names = list(accepted)
    return f"takes {', '.join(names)}" if names else "takes no settings"


def _value(text: str, setting: inspect.Parameter, description: str) -> float | str:
    """What a setting's text stands for: itself, a whole number, or a number."""
    if isinstance(setting.default, str):
        return text
    try:
        if setting.annotation is int and text.isdecimal():
            return int(text)
        return float(text)
    except ValueError as error:
        raise InputError(f"'{text}' in '{description}' is not a number.") from error

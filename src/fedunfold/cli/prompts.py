"""What a command still has to know: requested on a terminal, taken as its default elsewhere."""

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import typer

from fedunfold.cli import Stopped
from fedunfold.cli.wording import with_flags
from fedunfold.core.errors import InputError

Value = TypeVar("Value")


def watched() -> bool:
    """Whether someone sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


class Answers:
    """Prompts only where someone can answer, and never for what was given."""

    def __init__(self, yes: bool) -> None:
        self._ask = not yes and watched()

    def about(
        self, option: str, question: str, given: Value | None, default: Value | None, read: Callable[[str], Value]
    ) -> Value:
        """The value given, answered or by default; without any of them the option has to be given."""
        if given is not None:
            return given
        if not self._ask:
            if default is None:
                raise InputError(f"{option} is needed: {question}.")
            return default
        while True:
            try:
                text = typer.prompt(question, default=None if default is None else shown(default), err=True)
                return read(str(text))
            except typer.Abort:
                typer.echo(err=True)  # the question's own line
                raise Stopped("stopped; nothing was written.") from None
            except ValueError as error:  # InputError is one too
                reason = with_flags(str(error)) if isinstance(error, InputError) else f"{text!r} does not fit here."
                sys.stderr.write(f"{reason}\n")


def shown(value: object) -> str:
    """A value as it would be typed."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def widths(text: str) -> tuple[int, ...]:
    """``32,16`` as the widths of hidden layers; ``none`` is no layer.

    >>> widths("32,16"), widths("none")
    ((32, 16), ())
    """
    try:
        found = () if text.strip() == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if any(width < 1 for width in found):
        raise InputError(f"--hidden: {text!r} are no widths; write them as 32 or 64,32, or none for a linear model.")
    return found


def by_client(
    option: str, entries: Iterable[str], read: Callable[[str], Value]
) -> tuple[Value | None, dict[str, Value]]:
    """``0.8`` for all clients and ``site=0.5`` for one: (for all, by client)."""
    for_all: Value | None = None
    single: dict[str, Value] = {}
    for entry in entries:
        client, sign, text = entry.rpartition("=")
        try:
            value = read(text)
        except ValueError:
            raise InputError(f"{option}: {entry!r} is not understood; write NUMBER or CLIENT=NUMBER.") from None
        if sign:
            single[client] = value
        else:
            for_all = value
    return for_all, single

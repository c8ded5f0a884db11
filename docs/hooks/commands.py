"""The page of commands, made from the command line's own declarations."""

from collections.abc import Iterator
from typing import Any

import typer

from fedunfold.cli.app import app

HEADER = """# Commands

Made from the command line itself; `fedunfold COMMAND --help` says the same. Exit codes: 0 when all went well, 2 for
something you can fix (one sentence on standard error says what), 130 after Ctrl-C.
"""


def command_pages() -> str:
    """Usage, help, arguments and options of every command, in Markdown."""
    root: Any = typer.main.get_command(app)
    return "\n".join([HEADER, *_sections(root, root.make_context("fedunfold", [], resilient_parsing=True))])


def _sections(command: Any, context: Any) -> Iterator[str]:
    for name, inner in getattr(command, "commands", {}).items():
        below = inner.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(inner, "commands"):
            yield from _sections(inner, below)
        else:
            yield _section(inner, below)


def _section(command: Any, context: Any) -> str:
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [f"## {context.command_path}", "", command.help or "", "", "```text", " ".join(usage.split()), "```", ""]
    if command.epilog:
        lines += ["For example:", "", "```text", command.epilog.removeprefix("Example: "), "```", ""]
    rows = [_row(parameter, context) for parameter in command.params]
    return "\n".join([*lines, "| | | default |", "|---|---|---|", *rows, ""])


def _row(parameter: Any, context: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else parameter.make_metavar(context)
    choices = " ".join(getattr(parameter.type, "choices", ()))
    takes = "" if getattr(parameter, "is_flag", False) or not is_option else parameter.make_metavar(context)
    takes = takes.removesuffix(" RANGE")
    default = parameter.default
    shown = "" if default is None or default is False or callable(default) or not is_option else f"`{default}`"
    text = getattr(parameter, "help", None) or ""
    if parameter.required and is_option:
        shown = "required"
    what = f"`{name}`" + (f" `{takes}`" if takes and not choices else "")
    cells = (what, text + (f" One of: {choices}." if choices else ""), shown)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

"""Examples in docstrings as code blocks: Markdown would take `>>>` for quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)
"""From the first prompt to the next empty line, as doctest reads it."""


def fenced(text: str) -> str:
    """Every example, with what it prints, between fences."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class FencedDoctests(griffe.Extension):
    """Applied to every docstring of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

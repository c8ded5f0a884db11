"""Packages that only an extra brings, imported where they are used."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedunfold.core.errors import InputError

# What the Hugging Face libraries raise for a wrong name, no network or a broken file.
HUB_ERRORS = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError)


def import_extra(module: str, otherwise: str) -> Any:
    """Import a module that may not be installed.

    Args:
        module: Its dotted name.
        otherwise: The error where it is missing: what needs it, and the pip command that installs it.

    Returns:
        The module.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(otherwise) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Transformers without log lines, and download bars only where someone watches; the error says what is wrong."""
    bars = transformers.utils.logging
    hidden = bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    if hidden:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        if hidden:
            bars.enable_progress_bar()

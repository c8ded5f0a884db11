"""Packages that only an extra brings, imported where they are used."""

import importlib
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

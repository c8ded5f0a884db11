"""Environments by name: the ones that come with the package, and files."""

import difflib
from importlib import resources
from pathlib import Path

from fedunfold.config.schema import Environment
from fedunfold.core.errors import InputError


def bundled() -> tuple[str, ...]:
    """Names of the environments that come with the package.

    >>> "digits-flaky" in bundled()
    True
    """
    folder = resources.files("fedunfold.config") / "presets"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def environment(name_or_path: str | Path | Environment) -> Environment:
    """Find an environment.

    Args:
        name_or_path: The name of a bundled one, the path of a TOML file, or an environment, which is returned as it is.

    Returns:
        The environment.

    Raises:
        InputError: There is none of that name, or the file is wrong.

    >>> environment("digits-label-skew").rounds
    10
    """
    if isinstance(name_or_path, Environment):
        return name_or_path
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml"):
        return Environment.from_toml(name_or_path)
    names = bundled()
    if text in names:
        file = resources.files("fedunfold.config") / "presets" / f"{text}.toml"
        return Environment.parse(file.read_text(encoding="utf-8"), Path(f"{text}.toml"))
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise InputError(
        f"There is no environment {text!r}{hint} Bundled are {', '.join(names)}; "
        "a file of your own is given by a path that ends in .toml."
    )

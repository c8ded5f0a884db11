"""Environments by name: the ones that come with the package, and files."""

from importlib import resources
from pathlib import Path

from fedunfold.config.schema import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.registry import unknown
from fedunfold.io.atomic import is_plain_file


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
    if is_plain_file(beside := Path(f"{text}.toml")):
        raise InputError(f"unknown environment '{text}'; a file is named by its path: {beside}.")
    raise InputError(f"{unknown('environment', text, names)} A file of your own is named by a path that ends in .toml.")

"""Pre-trained rules by name: those that come with the package, and a user's own files."""

import re
from importlib.resources import files
from pathlib import Path

from fedunfold.core.errors import InputError
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule_file import load_rule

_SHIPPED = re.compile(r"(?P<family>[a-z][a-z-]*)-(?P<version>[0-9]+)\.safetensors")


def pretrained(name: str | Path = "open@1") -> ParametricRule:
    """A rule that was learned beforehand over many federations, ready for one that it has never met.

    Args:
        name: A rule that comes with the package, ``open@1``, or without a number its newest version, ``open``; or a
            rule file.

    Returns:
        The rule, with the server optimiser and the treatment of absent clients that it is for.

    Raises:
        InputError: There is no such rule, or its file cannot be used.

    >>> import fedunfold as fu
    >>> rule = fu.pretrained()
    >>> rule.name, rule.algorithm.absent
    ('open@1', 'remember')
    """
    shipped, given = _shipped(), str(name)
    if isinstance(name, Path) or Path(given).suffix or Path(given).name != given:
        return load_rule(name)
    newest = {family.partition("@")[0]: family for family in shipped}  # the last one is the newest
    found = newest.get(given, given)
    if found not in shipped:
        known = ", ".join([*newest, *shipped])
        raise InputError(f"there is no pre-trained rule '{given}'; choose among {known}, or give a rule file's path.")
    return load_rule(shipped[found])


def pretrained_names() -> tuple[str, ...]:
    """The rules that come with the package.

    >>> "open@1" in pretrained_names()
    True
    """
    return tuple(_shipped())


def _shipped() -> dict[str, Path]:
    """Their files by name, older versions first."""
    folder = Path(str(files("fedunfold"))) / "rules" / "shipped"
    matches = [(_SHIPPED.fullmatch(file.name), file) for file in folder.iterdir()]
    found = [(match["family"], int(match["version"]), file) for match, file in matches if match]
    return {f"{family}@{version}": file for family, version, file in sorted(found)}

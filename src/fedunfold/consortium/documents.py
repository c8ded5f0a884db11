"""The JSON files that sites exchange: of a known kind and version, with a checksum over all that is in them.

The checksum tells a file that was edited or damaged on its way from the one that was written. It is no signature.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Settings, explain
from fedunfold.io.atomic import read_json, write_atomically

VERSION = 1


class Document(Settings):
    """What is written to such a file, beside `kind`, `version` and `checksum`.

    Attributes:
        kind: What the file says that it is.
        made_by: The command that writes it, for messages.
    """

    kind: ClassVar[str]
    made_by: ClassVar[str]

    @property
    def checksum(self) -> str:
        """SHA-256 of its content, in hexadecimal digits."""
        return _checksum(self._content())

    def document(self) -> dict[str, Any]:
        """All that is in the file."""
        content = self._content()
        return {**content, "checksum": _checksum(content)}

    def text(self) -> str:
        """The file's text."""
        return json.dumps(self.document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the file."""
        write_atomically(path, lambda temporary: temporary.write_text(self.text(), encoding="utf-8"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Args:
            path: The file.

        Raises:
            InputError: It is none of this kind and version, was changed, or a field is wrong.
        """
        content = read_content(path, cls.kind, cls.made_by)
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            raise explain(error, f"{path}: ") from error

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "version": VERSION,
            **self.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }


def read_content(path: Path, kind: str, made_by: str) -> dict[str, Any]:
    """The fields of a file, once its kind, version and checksum have been compared.

    Args:
        path: The file.
        kind: What it has to be.
        made_by: The command that writes such files.

    Raises:
        InputError: It is something else, or was changed after it was written.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    found = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != kind:
        what = f"is a {found}" if isinstance(found, str) and found.isprintable() and len(found) < 50 else "is something"
        raise InputError(f"{path} {what} and no {kind}; give a file that {made_by} wrote.")
    if content.get("version") != VERSION:
        raise InputError(
            f"{path} was written by another version of fedunfold (files of version {content.get('version')!r:.20}, not "
            f"{VERSION}); install the same release everywhere, and make it again with {made_by}."
        )
    if _checksum(content) != content.get("checksum"):
        raise InputError(
            f"{path} was changed after it was written: its checksum is another one; get it again, or make it again "
            f"with {made_by}."
        )
    return {name: value for name, value in content.items() if name not in ("kind", "version", "checksum")}


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

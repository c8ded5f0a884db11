"""What a case must not do while it is read: start or load anything, call out, or write outside its folder."""

import os
import sys
from pathlib import Path
from typing import Any

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo")
WRITING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.symlink", "os.link", "os.truncate")


class Watch:
    """An audit hook, which cannot be taken off again, so it has a switch. What it sees is raised where it happens, and
    kept, in case that is caught."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        self._folder = str(folder)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and self._forbidden(event, arguments):
            self.seen.append(f"{event} {arguments!r:.200}")
            raise AssertionError(self.seen[-1])

    def _forbidden(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            mode = arguments[1]
            return isinstance(mode, str) and bool(set(mode) & set("wax+")) and self._outside(arguments[0])
        return event.startswith(FORBIDDEN) or event in NETWORK or (event in WRITING and self._at_large(arguments))

    def _at_large(self, arguments: tuple[Any, ...]) -> bool:
        """Not beside an open folder, which is how the harness itself clears folders away."""
        return arguments[-1] in (-1, None) and self._outside(arguments[0])

    def _outside(self, name: Any) -> bool:
        """A number stands for a file that is open already."""
        return not isinstance(name, int) and not os.path.abspath(os.fsdecode(name)).startswith(self._folder)  # noqa: PTH100

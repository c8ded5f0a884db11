"""The command line: parse, call, print."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedunfold.cli.wording import with_flags
from fedunfold.core.errors import FedunfoldError

INTERRUPTED = 130


class Stopped(Exception):
    """Ctrl-C, once a command has handled it; the message says in one line what became of the work."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what the user can fix is one line on standard error and exit code 2, Ctrl-C is exit code 130."""
    try:
        from fedunfold.cli.app import app  # takes a while, and Ctrl-C can come at any time

        with _notes():
            app(args=arguments)
    except FedunfoldError as error:
        sys.stderr.write(f"error: {with_flags(str(error))}\n")
        sys.exit(2)
    except (Stopped, KeyboardInterrupt) as stopped:
        sys.stderr.write(f"{str(stopped) or 'stopped.'}\n")
        sys.exit(INTERRUPTED)


class _Notes(logging.Handler):
    """What the library logs, such as from where it resumes: one line each on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{with_flags(record.getMessage())}\n")


@contextmanager
def _notes() -> Iterator[None]:
    log, notes = logging.getLogger("fedunfold"), _Notes()
    before = log.level
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(notes)

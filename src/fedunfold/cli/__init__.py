"""The command line: parse, call, print."""

import sys
from collections.abc import Sequence

from fedunfold.errors import FedunfoldError

INTERRUPTED = 130


class Stopped(Exception):
    """Ctrl-C, once a command has dealt with it; the message says in one line what became of the work."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what the user can mend is told in one line, with exit code 2, and Ctrl-C with 130."""
    try:
        from fedunfold.cli.app import app  # takes a while, and Ctrl-C can come at any time

        app(args=arguments)
    except FedunfoldError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except (Stopped, KeyboardInterrupt) as stopped:
        sys.stderr.write(f"{str(stopped) or 'stopped.'}\n")
        sys.exit(INTERRUPTED)

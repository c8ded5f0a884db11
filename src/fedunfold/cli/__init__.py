"""The command line: parse, call, print."""

from fedunfold.cli.app import main

__all__ = ["main"]

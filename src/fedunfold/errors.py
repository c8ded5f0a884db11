"""Errors a user can act on: one sentence that names the client, round, file or field and what to do."""


class FedunfoldError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with 2."""


class InputError(FedunfoldError, ValueError):
    """A setting, file or argument cannot be used as it is."""


class WriteError(InputError):
    """A file cannot be written; all that was written before it is whole, and can be gone on from."""


class DivergenceError(FedunfoldError, ArithmeticError):
    """Training left the finite numbers; the message names the round and the client."""

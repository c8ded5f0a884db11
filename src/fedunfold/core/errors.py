"""Errors a user can act on: one sentence that names the client, round, file or field and what to do."""

LONGEST = 1000  # characters of a message; a name from a file may be of any length


class FedunfoldError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with 2.

    >>> import fedunfold as fu
    >>> try:
    ...     fu.run("digits-label-skew", "fedavgg")
    ... except fu.FedunfoldError as error:
    ...     print(error)
    unknown method 'fedavgg'; did you mean 'fedavg'?
    """

    def __str__(self) -> str:
        """One line, whatever a file had in its names: nothing in it moves the cursor of a terminal."""
        text = super().__str__()
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InputError(FedunfoldError, ValueError):
    """A setting, file or argument cannot be used as it is.

    >>> issubclass(InputError, ValueError)
    True
    """


class WriteError(InputError):
    """A file cannot be written; all that was written before it is whole, and can be gone on from."""


class DivergenceError(FedunfoldError, ArithmeticError):
    """Training left the finite numbers; the message names the round and the client.

    >>> issubclass(DivergenceError, ArithmeticError)
    True
    """


class FederationError(FedunfoldError, ConnectionError):
    """Clients of a federation over a network could not be reached, or too few of them could.

    >>> issubclass(FederationError, ConnectionError)
    True
    """

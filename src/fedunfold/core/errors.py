"""Errors a user can act on: one sentence that names the client, round, file or field and what to do.

A message names an argument of the library as `out` or `overwrite=True`; the command line shows the option that sets it
instead.
"""

MAX_CHARACTERS = 1000
"""Of a message: a name from a file may be of any length."""


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
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]} … {text[-MAX_CHARACTERS // 2 :]}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InputError(FedunfoldError, ValueError):
    """A setting, file or argument cannot be used as it is.

    >>> issubclass(InputError, ValueError)
    True
    """


class WriteError(FedunfoldError, OSError):
    """A file cannot be written. All that was written before it is whole, and a run resumes from it.

    >>> issubclass(WriteError, OSError) and not issubclass(WriteError, ValueError)
    True
    """


class FederationError(FedunfoldError, ConnectionError):
    """Clients over a network cannot be reached, do not answer in time, or answer what cannot be used.

    Settings and files are in order where it is raised: the same call may succeed once the network or the clients do.

    >>> issubclass(FederationError, ConnectionError) and not issubclass(FederationError, ValueError)
    True
    """


class DivergenceError(FedunfoldError, ArithmeticError):
    """Training left the finite numbers; the message names the round and the client.

    >>> issubclass(DivergenceError, ArithmeticError)
    True
    """

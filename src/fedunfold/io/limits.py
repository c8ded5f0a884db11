"""How large what is read from a file, a command line or a message may be, before anything is allocated for it.

Every limit lies far above what a federation needs, so that what is beyond it is a mistake or a lie. Where one is in
the way all the same, the environment variable that its message names raises it.
"""

import os
from dataclasses import dataclass

from fedunfold.core.errors import InputError
from fedunfold.core.settings import shown


class LimitError(InputError):
    """More than is allowed."""


@dataclass(frozen=True)
class Limit:
    """At most so many of something.

    Attributes:
        name: Its name in the environment variable FEDUNFOLD_MAX_<name>.
        default: The limit where the variable is not set.
        unit: What is counted, for messages.
    """

    name: str
    default: int
    unit: str

    @property
    def variable(self) -> str:
        """The environment variable that raises it."""
        return f"FEDUNFOLD_MAX_{self.name}"

    @property
    def value(self) -> int:
        """The limit now: the variable's, or the default."""
        given = os.environ.get(self.variable)
        if given is None:
            return self.default
        if not (given.isascii() and given.isdigit() and len(given) <= 19):
            raise InputError(f"the environment variable {self.variable} must be a whole number, not {given!r}.")
        return int(given)

    def check(self, count: int, prefix: str = "") -> int:
        """Refuse what is too large.

        Args:
            count: How many there are.
            prefix: File or field at the beginning of the message, where nobody else names it.

        Returns:
            The count.

        Raises:
            LimitError: Where it is above the limit.
        """
        if count > self.value:
            raise LimitError(
                f"{prefix}{shown(count)} is more than the {self.value} {self.unit} that are allowed; "
                f"set {self.variable} if it is meant."
            )
        return count


CLIENTS = Limit("CLIENTS", 100_000, "clients")  # each has a weight in every round, and a line in the description
ROUNDS = Limit("ROUNDS", 100_000, "rounds")  # each has a row of weights, saved for every outer step
EPOCHS = Limit("EPOCHS", 10_000, "epochs a round")  # a round's minibatches are laid out before it begins
BATCH = Limit("BATCH", 10**9, "samples a minibatch")  # rows are counted in 32 bits
WIDTH = Limit("WIDTH", 100_000, "units in a hidden layer")
LAYERS = Limit("LAYERS", 100, "hidden layers")
PARAMETERS = Limit("PARAMETERS", 250_000_000, "parameters of a model")  # 1 GB, and as much for every client at work
FEATURES = Limit("FEATURES", 10_000_000, "features a sample")  # a remote client says how many, and a model is made
CLIENT_SAMPLES = Limit("CLIENT_SAMPLES", 10**9, "samples of a client")  # what a remote client may register
DIMENSIONS = Limit("DIMENSIONS", 8, "dimensions of a sample")  # of a remote client's; numpy ends at 64
CLASSES = Limit("CLASSES", 100_000, "classes")  # more are an identifier, and counting them would fill the memory
STATISTICS = Limit("STATISTICS", 1_000_000, "statistics of a test")  # of a remote client; two for each class
TABLE_NUMBERS = Limit("TABLE_NUMBERS", 10**8, "numbers of a table")  # 800 MB while they are worked on
TABLE_CLASSES = Limit("TABLE_CLASSES", 1000, "classes in a column")  # more are an identifier or a measurement
TABLE_TEXTS = Limit("TABLE_TEXTS", 100, "different texts in a column")  # more are names or remarks, no categories

KEY_BYTES = Limit("KEY_BYTES", 2**14, "bytes of a key file")  # a key takes less than a thousand
ENVIRONMENT_BYTES = Limit("ENVIRONMENT_BYTES", 4 * 2**20, "bytes of an environment file")  # half a million row numbers
NAME_PARTS = Limit("NAME_PARTS", 16, "parts of a dotted name")  # tomllib's work grows with their square
TRACE_BYTES = Limit("TRACE_BYTES", 2**26, "bytes of a clock's trace")  # a line for each training
LINE_BYTES = Limit("LINE_BYTES", 2**24, "bytes of a line of a CSV file")  # a file without line ends is no table
RECORD_BYTES = Limit("RECORD_BYTES", 16 * 2**20, "bytes of a JSON record")  # Python's lists take twenty times that
LINES_BYTES = Limit("LINES_BYTES", 2**29, "bytes of a file of JSON lines")  # a line for each round
FEDERATION_BYTES = Limit("FEDERATION_BYTES", 2**26, "bytes of a federation's record")  # counts by client and class
WEIGHTS_BYTES = Limit("WEIGHTS_BYTES", 2**29, "bytes of a file of learned weights")  # Θ at every outer iteration
RULE_BYTES = Limit("RULE_BYTES", 2**22, "bytes of a rule file")  # the rule we ship takes less than 200 kB
HEADER_BYTES = Limit("HEADER_BYTES", 16 * 2**20, "bytes of a .safetensors header")  # JSON too
UNPACKED_BYTES = Limit("UNPACKED_BYTES", 2**27, "bytes unpacked from a small .npz")  # see data/npz.py

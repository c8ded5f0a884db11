"""How large what is read from a file, a command line or a message may be, before anything is allocated for it.

Every limit lies far above what a federation needs, so that what is beyond it is a mistake or a lie. Where one is in
the way all the same, the environment variable that its message names raises it.
"""

import os
from dataclasses import dataclass

from fedunfold.core.errors import InputError

LARGEST = 2**63 - 1  # what TOML, Flower's records and numpy take for a whole number


class LimitError(InputError):
    """More than is believed."""


@dataclass(frozen=True)
class Limit:
    """At most `usual` of something, or what the environment variable FEDUNFOLD_MAX_<name> says."""

    name: str
    usual: int
    things: str

    @property
    def variable(self) -> str:
        return f"FEDUNFOLD_MAX_{self.name}"

    @property
    def most(self) -> int:
        said = os.environ.get(self.variable)
        if said is None:
            return self.usual
        if not (said.isascii() and said.isdigit() and len(said) <= 19):
            raise InputError(f"the environment variable {self.variable} must be a whole number, not {said!r}.")
        return int(said)

    def check(self, value: int, prefix: str = "") -> int:
        """The value, where it is not too large; `prefix` names file or field where nobody else does."""
        if value > self.most:
            found = str(value) if value <= LARGEST else "that"
            raise LimitError(
                f"{prefix}{found} is more than the {self.most} {self.things} that are believed; "
                f"set {self.variable} if it is meant."
            )
        return value


CLIENTS = Limit("CLIENTS", 100_000, "clients")  # each has a weight in every round, and a line in the description
ROUNDS = Limit("ROUNDS", 100_000, "rounds")  # each has a row of weights, kept for every outer step
EPOCHS = Limit("EPOCHS", 10_000, "epochs a round")  # a round's minibatches are laid out before it begins
BATCH = Limit("BATCH", 10**9, "samples a minibatch")  # rows are counted in 32 bits
WIDTH = Limit("WIDTH", 100_000, "units in a hidden layer")
LAYERS = Limit("LAYERS", 100, "hidden layers")
PARAMETERS = Limit("PARAMETERS", 250_000_000, "parameters of a model")  # 1 GB, and as much for every client at work
FEATURES = Limit("FEATURES", 10_000_000, "features a sample")  # a remote client says how many, and a model is made

ENVIRONMENT_BYTES = Limit("ENVIRONMENT_BYTES", 4 * 2**20, "bytes of an environment file")  # half a million row numbers
RECORD_BYTES = Limit("RECORD_BYTES", 16 * 2**20, "bytes of a JSON record")  # Python's lists take twenty times that
LINES_BYTES = Limit("LINES_BYTES", 2**29, "bytes of a file of JSON lines")  # a line for each round
HEADER_BYTES = Limit("HEADER_BYTES", 16 * 2**20, "bytes of a .safetensors header")  # JSON too
UNPACKED_BYTES = Limit("UNPACKED_BYTES", 2**27, "bytes unpacked from a small .npz")  # see data/npz.py
FEDERATION_BYTES = Limit(
    "FEDERATION_BYTES", 2**26, "bytes of a federation's record"
)  # counts for each client and class
WEIGHTS_BYTES = Limit("WEIGHTS_BYTES", 2**29, "bytes of a file of learned weights")  # Θ at every outer iteration

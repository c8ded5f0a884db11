"""Shakespeare: the next character of a play, every speaker a client."""

import re
import string
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count
from fedunfold.data.importers.imported import client_key
from fedunfold.data.natural.base import Clients, NaturalSource
from fedunfold.data.natural.files import PublicFile, read_public
from fedunfold.data.sources import Pair
from fedunfold.tasks.next_token import IGNORED

FILE = PublicFile(
    "shakespeare.txt",
    "https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
VOCABULARY = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
"""The 65 characters of the text; a character's token is its position here."""
FEWEST_SPEECHES = 20


class ShakespeareSource(NaturalSource):
    """What 99 speakers say, those with 20 speeches or more, as windows of characters and of the characters after them.

    A speaker's speeches are joined in the order of the plays; the last part of that text is for testing. Either part is
    cut into windows that do not overlap; what fills up the last one does not count.

    Attributes:
        window: Characters in a window.
        test_fraction: The part of each speaker's text to test on.

    Reference: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, who took
    all of Shakespeare; this is the text of Karpathy 2015.
    """

    source: Literal["shakespeare"] = "shakespeare"
    window: Count = 80
    test_fraction: float = Field(default=0.2, gt=0, lt=1)

    def load_clients(self) -> tuple[Clients, Pair]:
        name, text = read_public(FILE)
        clients: Clients = {}
        tests = []
        for speaker, speeches in read_speeches(text, name).items():
            if len(speeches) >= FEWEST_SPEECHES:
                tokens = _tokens("\n".join(speeches), name)
                cut = len(tokens) - round(self.test_fraction * len(tokens))
                clients[client_key(speaker)] = self._windows(tokens[:cut])
                tests.append(self._windows(tokens[cut:]))
        if not clients:
            raise InputError(f"{name} has no speaker with {FEWEST_SPEECHES} speeches; get the file again.")
        return clients, (np.concatenate([x for x, _ in tests]), np.concatenate([y for _, y in tests]))

    def _windows(self, tokens: NDArray[np.int64]) -> Pair:
        """Inputs and the tokens after them, [windows, window]."""
        count = -(-(len(tokens) - 1) // self.window)
        x = np.zeros(count * self.window, dtype=np.int64)
        y = np.full(count * self.window, IGNORED, dtype=np.int64)
        x[: len(tokens) - 1], y[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        return x.reshape(count, self.window), y.reshape(count, self.window)


def read_speeches(text: str, name: str) -> dict[str, list[str]]:
    """The speeches of every speaker, in order.

    Args:
        text: Speeches with an empty line between, each after a line with the speaker's name and a colon.
        name: What messages call the text.

    Returns:
        Speeches by speaker, in the order in which they first speak.

    Raises:
        InputError: A speech has no speaker.

    >>> read_speeches("KENT:\\nMy lord!\\n\\nLEAR:\\nOut of my sight!\\n\\nKENT:\\nSee better.\\n", "lear.txt")
    {'KENT': ['My lord!', 'See better.'], 'LEAR': ['Out of my sight!']}
    """
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n{2,}", text.strip("\n")):
        speaker, _, speech = block.partition("\n")
        if not speaker.endswith(":"):
            raise InputError(f"{name}: there is no speaker before {block[:40]!r}; get the file again.")
        found.setdefault(speaker[:-1], []).append(speech)
    return found


def _tokens(text: Sequence[str], name: str) -> NDArray[np.int64]:
    """The token of every character."""
    if odd := sorted(set(text) - set(VOCABULARY)):
        raise InputError(f"{name} has the character {odd[0]!r}, which Shakespeare's text lacks; get the file again.")
    return np.array([VOCABULARY.index(character) for character in text], dtype=np.int64)

"""Vowels of British English, spoken by 15 people."""

import re
from typing import Literal

import numpy as np
from pydantic import Field

from fedunfold.core.errors import InputError
from fedunfold.data.natural.base import Clients, HeldOutSource
from fedunfold.data.natural.files import PublicFile, parse_numbers, read_public
from fedunfold.data.sources import Pair

FILE = PublicFile(  # no checksum of it is published
    "vowel-context.data",
    "https://archive.ics.uci.edu/dataset/152/connectionist+bench+vowel+recognition+deterding+data",
)
SPEAKERS, COLUMNS = 15, 14
VOWELS = ("hid", "hId", "hEd", "hAd", "hYd", "had", "hOd", "hod", "hUd", "hud", "hed")


class VowelSource(HeldOutSource):
    """990 vowels, ten features, eleven classes; the clients are speaker-0 … speaker-14.

    The file's own split, by speaker, is not used: every speaker trains. A third of its six utterances of each vowel is
    for testing.

    Reference: Deterding 1989; Robinson 1989; Connectionist Bench (Vowel Recognition), UCI.
    """

    source: Literal["vowel"] = "vowel"
    test_fraction: float = Field(default=1 / 3, gt=0, lt=1)

    def load_clients(self) -> tuple[Clients, Pair]:
        name, text = read_public(FILE)
        lines = [re.split(r"[,\s]+", line.strip()) for line in text.splitlines() if line.strip()]
        table = parse_numbers(lines, name)
        if table.shape[1] != COLUMNS:
            raise InputError(f"{name} has {table.shape[1]} columns, where {COLUMNS} belong; get the file again.")
        speaker, vowel = table[:, 1], table[:, -1]
        odd = ~np.isin(speaker, range(SPEAKERS)) | ~np.isin(vowel, range(len(VOWELS)))
        if odd.any():
            line = int(odd.argmax()) + 1
            raise InputError(f"{name}, line {line}: is of no speaker 0 to 14 or no vowel 0 to 10; get the file again.")
        owners = [f"speaker-{number:.0f}" for number in speaker]
        return self.split_by_owner(table[:, 3:-1], vowel.astype(np.int64), owners, VOWELS)

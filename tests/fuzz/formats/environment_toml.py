"""Environment files, read, written again, and their data loaded where that is quick."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from random import Random
from unittest import mock

import tomli_w

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.data import sources
from fedunfold.data.config import MnistSource
from fedunfold.data.natural.base import NaturalSource
from tests.fuzz import mutation
from tests.fuzz.formats import own_npz
from tests.fuzz.judging import understood, written

DIGITS = cache(sources.load_digits)
NAMES = ("digits-label-skew", "digits-flaky", "digits-quantity-skew", "mnist-3")
MINE = b"""
name = "mine"
rounds = 3
batch_size = 4
lr = 0.1
clients_per_round = 3
[model]
hidden = [8, 4]
[data]
source = "npz"
path = "mine.npz"
[partition]
kind = "dirichlet"
alpha = 0.3
[[clients]]
key = "site"
count = 5
epochs = [1, 2, 3]
"""


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.toml", data)
    written("mine.npz", own_npz.seeds()["dealt"])

    def read() -> None:
        env = Environment.from_toml(path)
        env.to_toml(path.parent)
        model_factory(env.model, (4,), 3)
        if not isinstance(env.data, MnistSource | NaturalSource):  # which may be downloaded
            with mock.patch.object(sources, "load_digits", DIGITS):
                env.digest(env.load())

    subjects = ("field ", "Client ", "Class ", "Label ", "sizes", "samples", "features file", ".npz", "plain file")
    return understood(read, str(path.parent), *subjects)


def seeds() -> Mapping[str, bytes]:
    folder = resources.files("fedunfold.config") / "presets"
    return {name: (folder / f"{name}.toml").read_bytes() for name in NAMES} | {"mine": MINE}


def mutate(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.4:
        return mutation.of_bytes(data, rng)
    try:
        return tomli_w.dumps(mutation.of_tree(tomllib.loads(data.decode()), rng)).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):  # what TOML has no word for
        return mutation.of_bytes(data, rng)

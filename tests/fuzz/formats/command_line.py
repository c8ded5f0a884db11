"""What is typed: one argument a line. Work that would take long is not begun."""

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from fedunfold import api
from fedunfold.cli import main
from fedunfold.rules.learned import LearnedWeights
from tests.fuzz.judging import scratch
from tests.fuzz.mutation import NUMBERS, TEXTS, of_bytes

TOML = """
name = "tiny"
rounds = 1
batch_size = 4
lr = 0.1
[data]
source = "npz"
path = "tiny.npz"
[partition]
kind = "iid"
[[clients]]
key = "site"
count = 2
"""
SPECS = ("dr:q=1", "dr:q=2,loss=start", "fedadp:beta=7", "prox:mu=0.1", "momentum:rho=0.9", "adam:lr=0.01", "fedfa")
ODD = (*map(str, NUMBERS), *SPECS, *TEXTS, "nan", "inf", "-1e-9", "dr:q=nan", "prox:mu=inf", "dr:q=1e308")
SEEDS = {
    "run": "run\ntiny.toml\n--rule\ndr:q=1\n--local\nprox:mu=0.1\n--server\nadam:lr=0.01",
    "run-json": "run\ntiny.toml\n--method\nfednova\n--rounds\n2\n--seed\n3\n--trial\n1\n--format\njson",
    "compare": "compare\ntiny.toml\n--methods\nfedavg,dr-fedavg\n--trials\n1\n--out\nout\n--overwrite",
    "learn": "learn\ntiny.toml\n--iterations\n1\n--outer-lr\n0.1\n--kl-weight\n0.1\n--num-samples\n1\n"
    "--out\nout\n--overwrite",
    "check": "env\ncheck\ntiny.toml\n--format\njson",
    "show": "env\nshow\ndigits-flaky",
    "theory": "theory\nout\n--L\n1.5\n--sigma\n1\n--G\n1\n--kappa\n0\n--beta\n1\n--gap\n2",
    "help": "compare\n--help",
}


class TooMuch(Exception):
    """The arguments were understood, and ask for more work than a test does."""


@cache
def _home() -> Path:
    """A folder with a small environment in it."""
    folder = scratch() / "home"
    folder.mkdir()
    (folder / "tiny.toml").write_text(TOML)
    x, y = np.eye(6, dtype=np.float32), np.array([0, 1, 2, 0, 1, 2])
    np.savez(folder / "tiny.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return folder


@contextlib.contextmanager
def _brief() -> Iterator[None]:
    """Only what is over at once is worked off."""
    run_once, compare_all, learn_weights = api.run, api.compare, api.learn_weights

    def small(env: Any, *counts: int) -> None:
        if env.rounds > 3 or any(count > 2 for count in counts):
            raise TooMuch

    def brief_run(env: Any, *rest: Any, **named: Any) -> Any:
        small(env)
        return run_once(env, *rest, **named)

    def brief_compare(env: Any, methods: Any, **named: Any) -> Any:
        small(
            env,
            named["trials"],
            len(methods),
            *(m.learning.iterations * m.learning.num_samples for m in methods if not m.rule),
        )
        return compare_all(env, methods, **named)

    def brief_learn(env: Any, **named: Any) -> LearnedWeights:
        small(env, named["learning"].iterations, named["learning"].num_samples)
        return learn_weights(env, **named)

    with (
        mock.patch.object(api, "run", brief_run),
        mock.patch.object(api, "compare", brief_compare),
        mock.patch.object(api, "learn_weights", brief_learn),
        contextlib.chdir(_home()),
    ):
        yield


def _elsewhere(arguments: list[str]) -> bool:
    """Whether the run is to be written outside the folder it is started in."""
    named = [value for flag, value in pairwise(arguments) if flag == "--out"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--out=")]
    return any(Path(name).is_absolute() or ".." in Path(name).parts for name in named)


def fuzz(data: bytes) -> bool:
    arguments = os.fsdecode(data.replace(b"\0", b"")).split("\n")
    if arguments[0] in ("reproduce", "benchmark", "demo", "data"):
        return False  # these do hours of work, or none without files
    if _elsewhere(arguments):
        return False  # whoever says so may write there, but not a test
    out, err, code = io.StringIO(), io.StringIO(), 0
    with _brief(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except TooMuch:
            return True
    said = err.getvalue()
    assert code in (0, 2), f"exit code {code}: {said}"
    assert "Traceback" not in said, said
    if code and said.startswith("error: "):
        assert said.count("\n") == 1 and said.rstrip("\n").isprintable(), repr(said)
    return code == 0


def seeds() -> Mapping[str, bytes]:
    return {name: text.encode() for name, text in SEEDS.items()}


def mutate(data: bytes, rng: Random) -> bytes:
    """An argument replaced, changed, left out or said twice."""
    if rng.random() < 0.2:
        return of_bytes(data, rng)
    arguments = data.split(b"\n")
    number = rng.randrange(len(arguments))
    word = rng.choice(ODD)
    match rng.randrange(5):
        case 0:
            del arguments[number]
        case 1:
            arguments.insert(number, arguments[rng.randrange(len(arguments))])
        case 2:
            arguments[number] = of_bytes(arguments[number], rng)
        case _:
            arguments[number] = word.replace("\n", " ").encode()
    return b"\n".join(arguments)

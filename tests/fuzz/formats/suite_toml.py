"""Suites of benchmarks, read, with their methods and environments made, but no data loaded."""

from collections.abc import Mapping
from importlib import resources

from fedunfold.studies.benchmark.contenders import contenders
from fedunfold.studies.benchmark.suites import find_suite
from tests.fuzz.formats.environment_toml import mutate
from tests.fuzz.judging import understood, written

__all__ = ["fuzz", "mutate", "seeds"]

MINE = b"""
name = "mine"
trials = 2
methods = ["fedavg", "halved"]
[contenders.halved]
base = "fedavg"
grid = ["server=sgd:lr=0.5", "local=prox:mu=0.1 server=sgd:lr=2"]
[[environments]]
environment = "digits-label-skew"
redraw = true
choose_by = "balanced_accuracy"
[environments.changes]
rounds = 2
partition = { kind = "dirichlet", alpha = 0.3 }
"""


def fuzz(data: bytes) -> bool:
    path = written("fuzzed-suite.toml", data)

    def read() -> None:
        suite, folder = find_suite(str(path))
        contenders(suite.methods, suite.contenders, suite.without)
        for place in suite.environments:
            place.case(folder, 0)

    subjects = ("field ", "method", "unknown", "environment", "Environment", "setting", "suite", "plain file")
    return understood(read, str(path.parent), *subjects)


def seeds() -> Mapping[str, bytes]:
    folder = resources.files("fedunfold.studies.benchmark") / "suites"
    return {name: (folder / f"{name}.toml").read_bytes() for name in ("demo", "natural")} | {"mine": MINE}

"""How many files of the package run in one simulated round on the CPU, and in one weight-learning run.

    python -m benchmarks.path_length

Files are counted by `sys.setprofile`: those of the package in which a function is called, in any thread. Imports do not
count: everything is run once before.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import fedunfold as fu
from fedunfold.core.algorithm import Algorithm
from fedunfold.engines.simulation import SimulatedFederation

PACKAGE = Path(fu.__file__).parent
ENVIRONMENT = "digits-label-skew"


def executed_files(action: Callable[[], object]) -> list[str]:
    """The package's files that run in an action, relative to the package; it is done once before, to import."""
    action()
    codes: set[CodeType] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = {Path(code.co_filename) for code in codes}
    return sorted(file.relative_to(PACKAGE).as_posix() for file in files if file.is_relative_to(PACKAGE))


def round_files() -> list[str]:
    """Of one round of FedAvg; data and federation are made before it."""
    federation = SimulatedFederation(fu.environment(ENVIRONMENT))
    request = Algorithm().request("trial-0", 0, federation.initial_model("trial-0"))
    return executed_files(lambda: federation.train([request]))


def learning_files() -> list[str]:
    """Of learning weights, from the environment's name on, with one outer iteration."""
    return executed_files(lambda: fu.learn_weights(ENVIRONMENT, learning=fu.Learning(iterations=1)))


if __name__ == "__main__":
    for name, files in (("a round", round_files()), ("learning weights", learning_files())):
        print(f"{name}: {len(files)} files", *files, "", sep="\n")

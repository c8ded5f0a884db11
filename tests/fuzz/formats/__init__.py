"""One module for each format that is read."""

from collections.abc import Mapping
from importlib import import_module
from random import Random
from typing import Protocol

NAMES = (
    "environment_toml",
    "suite_toml",
    "own_npz",
    "features_npz",
    "features_safetensors",
    "weights",
    "rule_file",
    "learning_checkpoint",
    "run_checkpoint",
    "run_folder",
    "assignment_json",
    "reproduction_records",
    "benchmark_records",
    "partial_features",
    "flower_messages",
    "flower_arrays",
    "flower_secagg",
    "command_line",
)


class Format(Protocol):
    """What a module here has."""

    def fuzz(self, data: bytes) -> bool:
        """Whether the data were understood; AssertionError where they were neither that nor refused as they should."""
        ...

    def seeds(self) -> Mapping[str, bytes]:
        """Valid data, by a name."""
        ...

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """The data made wrong."""
        ...


def format_of(name: str) -> Format:
    module: Format = import_module(f"tests.fuzz.formats.{name}")
    return module

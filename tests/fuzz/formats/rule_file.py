"""Files of pre-trained rules, read, and made a method of."""

from collections.abc import Mapping

from fedunfold.core.algorithm import Algorithm
from fedunfold.rules.rule_file import is_rule_file, load_rule, save_rule
from fedunfold.server import adam
from fedunfold.training.methods import as_method
from tests.fuzz.judging import resealed, scratch, understood, written
from tests.fuzz.mutation import of_safetensors as mutate
from tests.support.rules import small_rule

__all__ = ["fuzz", "mutate", "seeds"]


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.safetensors", resealed(data))
    is_rule_file(path)
    return understood(lambda: as_method(load_rule(path)), "fuzzed.safetensors")


def seeds() -> Mapping[str, bytes]:
    found, path = {}, scratch() / "seed.safetensors"
    for name, algorithm in {"plain": Algorithm(absent="remember"), "adam": Algorithm(server=adam())}.items():
        save_rule(small_rule(algorithm=algorithm), path)
        found[name] = path.read_bytes()
    return found

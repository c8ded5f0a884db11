"""Files of learned weights, read, mapped, and made a method of."""

from collections.abc import Mapping
from dataclasses import asdict

import torch

from fedunfold.core.algorithm import Algorithm
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.methods import learned_method
from fedunfold.unfolding import Learning
from tests.fuzz.judging import resealed, scratch, understood, written
from tests.fuzz.mutation import of_safetensors as mutate

__all__ = ["fuzz", "mutate", "seeds"]


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.safetensors", resealed(data))

    def use() -> None:
        learned = LearnedWeights.load(path)
        learned_method(learned.adapt(learned.client_ids[:1], 5, "", allow_mapping=True))

    return understood(use, "fuzzed.safetensors", "the weights", "the learned weights", "server", "update", "step size")


def seeds() -> Mapping[str, bytes]:
    found = {}
    for name, algorithm in {"plain": Algorithm(), "steps": Algorithm(step_sizes=(1.0, 0.5, 2.0))}.items():
        path = scratch() / "seed.safetensors"
        made(algorithm).save(path)
        found[name] = path.read_bytes()
    return found


def made(algorithm: Algorithm) -> LearnedWeights:
    history = torch.full((3, 3, 2), 0.5, dtype=torch.float64)
    settings = {"algorithm": algorithm.describe(), "learning": asdict(Learning(iterations=2))}
    return LearnedWeights(
        ("a", "b"), history[-1].clone(), torch.tensor([2.0, 1.0]).double(), history, settings, "d" * 64
    )

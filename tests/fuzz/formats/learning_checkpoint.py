"""Where a weight-learning run stands, and is resumed from."""

from collections.abc import Mapping

import torch

from fedunfold.io.checkpoint import Checkpoint
from fedunfold.unfolding.state import Progress
from tests.fuzz.judging import resealed, scratch, understood, written
from tests.fuzz.mutation import of_safetensors as mutate

__all__ = ["fuzz", "mutate", "seeds"]

IDENTITY = {"keys": ["a", "b"], "rounds": 3}
BETAS = (0.9, 0.999)


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.safetensors", resealed(data))

    def use() -> None:
        found = Progress.load(Checkpoint(path, "learning", IDENTITY), BETAS)
        assert found is not None
        found.after(1.0, torch.ones_like(found.roots), 0.1)

    return understood(use, "fuzzed.safetensors")


def seeds() -> Mapping[str, bytes]:
    start = Progress.start(torch.tensor([0.25, 0.75], dtype=torch.float64), [1.0] * 3, BETAS)
    path = scratch() / "seed.safetensors"
    start.after(1.5, torch.ones_like(start.roots), 0.1).save(Checkpoint(path, "learning", IDENTITY))
    return {"one-step": path.read_bytes()}

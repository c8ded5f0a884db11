"""Where a run stands, gone on from."""

from collections.abc import Mapping

import torch

from fedunfold.federation import Evaluation
from fedunfold.run_state import RunState
from tests.fuzz.judging import scratch, understood, written
from tests.fuzz.mutation import of_safetensors as mutate

__all__ = ["fuzz", "mutate", "seeds"]

IDENTITY = {"run": "trial-0", "rule": "dr"}


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.safetensors", data)

    def use() -> None:
        found = RunState.load(path, IDENTITY, torch.device("cpu"))
        found.save(path, IDENTITY)

    return understood(use, "fuzzed.safetensors")


def seeds() -> Mapping[str, bytes]:
    weights, present = torch.tensor([0.5, 0.5]).double(), torch.tensor([True, False])
    seen = Evaluation(0.5, 1.25, torch.tensor([0.5, float("nan")]))
    state = RunState(torch.ones(6), (torch.zeros(6),), {0: torch.ones(6)}, {"a": 1.5}, [weights], [present], [seen])
    path = scratch() / "seed.safetensors"
    state.save(path, IDENTITY)
    return {"one-round": path.read_bytes()}

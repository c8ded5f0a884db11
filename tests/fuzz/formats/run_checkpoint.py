"""Where a run stands, gone on from."""

from collections.abc import Mapping

import torch

from fedunfold.aggregation.screening import RejectedUpdate
from fedunfold.core.federation import Evaluation
from fedunfold.io.checkpoint import Checkpoint
from fedunfold.training.state import RunState, load_states, save_states
from tests.fuzz.judging import resealed, scratch, understood, written
from tests.fuzz.mutation import of_safetensors as mutate

__all__ = ["fuzz", "mutate", "seeds"]

IDENTITY = {"run": "trial-0", "rule": "dr"}


def fuzz(data: bytes) -> bool:
    checkpoint = Checkpoint(written("fuzzed.safetensors", resealed(data)), "run", IDENTITY)

    checkpoint.before.unlink(missing_ok=True)

    def use() -> None:
        found = load_states(checkpoint, torch.device("cpu"))
        assert found is not None
        save_states(checkpoint, found)

    return understood(use, "fuzzed.safetensors")


def seeds() -> Mapping[str, bytes]:
    weights, present = torch.tensor([0.5, 0.5]).double(), torch.tensor([True, False])
    seen = Evaluation(0.5, 1.25, torch.tensor([0.5, float("nan")]))
    state = RunState(
        *(torch.ones(6), (torch.zeros(6),), {0: torch.ones(6)}, {"a": 1.5}, [weights], [present], [seen]),
        lengths=[torch.tensor([0.5, float("nan")]).double()],
        rejected=[RejectedUpdate(0, "b", "is too long")],
    )
    path = scratch() / "seed.safetensors"
    save_states(Checkpoint(path, "run", IDENTITY), [state])
    return {"one-round": path.read_bytes()}

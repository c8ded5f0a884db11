"""Where a run stands, and is resumed from."""

from collections.abc import Mapping

import torch

from fedunfold.aggregation.server_round import ServerState
from fedunfold.core.outcomes import Evaluation, RejectedUpdate
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
    weights, participated = torch.tensor([0.5, 0.5]).double(), torch.tensor([True, False])
    seen = Evaluation(0.5, 1.25, torch.tensor([0.5, float("nan")]), {"accuracy": 0.5})
    state = RunState(
        ServerState(torch.ones(6), (torch.zeros(6),), {0: torch.ones(6)}, torch.ones(6)),
        {"a": 1.5, "b": [torch.ones(2)]},
        [weights],
        [participated],
        [seen],
        [torch.tensor([0.5, float("nan")]).double()],
        [RejectedUpdate(0, "b", "is too large")],
    )
    path = scratch() / "seed.safetensors"
    save_states(Checkpoint(path, "run", IDENTITY), [state])
    return {"one-round": path.read_bytes()}

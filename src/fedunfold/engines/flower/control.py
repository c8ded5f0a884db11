"""A client's control variates (`core.control`), which stay with it from round to round in its Flower context.

With every message the server names the last round that the client's update entered; the client begins from what it
stored after training in that round. Later ones belong to updates that were rejected or lost on the way. So the same
message may come twice, and a server may resume a run from the round before. The exact adjoint meets all rounds again,
for which all of them are kept until the next run by which weights are learned.
"""

from collections.abc import Callable

import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.schema import (
    CONTROL,
    OWN_CONTROL,
    Arrays,
    ClientReply,
    TrainInstruction,
)
from fedunfold.engines.flower.wire import read_array

RECORD = "fedunfold-control"
LOST = "control_lost"
"""The number in a train reply that is 1 where a client that took part before had no control variate left."""


def with_control(
    answer: Callable[[TrainInstruction, Arrays], ClientReply],
    instruction: TrainInstruction,
    arrays: Arrays,
    state: RecordDict,
) -> ClientReply:
    """A client's answer to a message, by its control variate where it trains under one.

    Args:
        answer: The client's answer to what it is to do and the arrays that come with it.
        instruction: What it is to do.
        arrays: What came with the message.
        state: The context's state, where the control variate after the round is stored.
    """
    before = instruction.control_round
    if before is None:
        return answer(instruction, arrays)
    record = _record(instruction)
    stored = state.array_records[record] if record in state else ArrayRecord()
    found = stored.get(_entry(instruction, before))
    lost = before >= 0 and found is None
    own = torch.zeros_like(arrays["model"]) if found is None else torch.from_numpy(read_array(found, CONTROL).copy())
    reply = answer(instruction, {**arrays, OWN_CONTROL: own})
    if CONTROL not in reply.arrays:
        if lost:
            raise InputError(
                f"round {instruction.round}: the control variate that the adjoint needs is lost, that after round "
                f"{before}; learn again."
            )
        return reply
    kept = {name: array for name, array in stored.items() if _is_needed(name, instruction, before)}
    kept[_entry(instruction, instruction.round)] = Array(reply.arrays[CONTROL].numpy())
    state[record] = ArrayRecord(kept)
    shown = {name: array for name, array in reply.arrays.items() if name != CONTROL}
    return ClientReply({**reply.metrics, LOST: float(lost)}, shown)


def _record(instruction: TrainInstruction) -> str:
    """The context's record for a run; those by which weights are learned come one after the other, and share one."""
    return f"{RECORD}:{instruction.run}" if instruction.outer is None else RECORD


def _entry(instruction: TrainInstruction, t: int) -> str:
    return f"{instruction.run}:{t}"


def _is_needed(entry: str, instruction: TrainInstruction, before: int) -> bool:
    """Whether a message to come may name it: what it begins from now, or what the exact adjoint comes back to."""
    run, _, t = entry.rpartition(":")
    goes_backward = instruction.outer is not None and instruction.curvature
    return run == instruction.run and (int(t) <= before if goes_backward else int(t) == before)

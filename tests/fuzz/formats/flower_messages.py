"""What comes over Flower's wire: instructions a client reads, replies and registrations a server reads."""

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Wire
from google.protobuf.message import DecodeError

from fedunfold.engines.flower.replies import ExpectedReply
from fedunfold.engines.flower.schema import ClientDescription, ClientReply, TrainInstruction
from fedunfold.engines.flower.wire import (
    instruction_record,
    read_instruction,
    read_registration,
    read_reply,
    registration_record,
    reply_record,
)
from fedunfold.local import prox
from fedunfold.unfolding.outer_loss import Balanced
from tests.fuzz import mutation
from tests.fuzz.judging import understood_by_any

INSTRUCTION = TrainInstruction(
    run="trial-0",
    round=2,
    seed=1,
    lr=0.1,
    batch_size=8,
    epochs=2,
    optimizer=prox(0.1),
    required_metrics=("loss",),
    outer=Balanced(),
)
MODEL = torch.linspace(-1, 1, 12)
DESCRIPTION = ClientDescription("site-a", (5, 0, 7), "classification:classes=3", {"": (8, 8)}, num_statistics=6)
EXPECTED = ExpectedReply({"updates": MODEL}, frozenset({"loss", "outer_loss"}))
HOSTILE: tuple[Any, ...] = (
    0,
    -1,
    2**63 - 1,
    0.5,
    float("nan"),
    "",
    "a\nb",
    "[" * 5000,
    "9" * 5000,
    b"\0",
    True,
    [1],
    [0.5],
)
SUBJECTS = ("message", "reply", "registration", "client", "number", "array", "record", "TrainInstruction", "has ")


def fuzz(data: bytes) -> bool:
    record = record_of(data)
    if record is None:
        return False
    readers = (
        lambda: read_instruction(record),
        lambda: EXPECTED.check(read_reply(record)),
        lambda: read_registration(record),
    )
    return understood_by_any(readers, *SUBJECTS)


def record_of(data: bytes) -> RecordDict | None:
    """A record, where Flower itself takes it for one."""
    try:
        return recorddict_from_proto(Wire.FromString(data))
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def seeds() -> Mapping[str, bytes]:
    reply = ClientReply({"loss": 1.5, "outer_loss": 2.5}, {"updates": MODEL})
    return {
        "instruction": on_wire(instruction_record(INSTRUCTION, {"model": MODEL, "adjoint": MODEL.double()})),
        "reply": on_wire(reply_record(reply)),
        "registration": on_wire(registration_record(DESCRIPTION)),
    }


def on_wire(record: RecordDict) -> bytes:
    return bytes(recorddict_to_proto(record).SerializeToString(deterministic=True))


def mutate(data: bytes, rng: Random) -> bytes:
    """A value in one of the records, or the bytes on the wire."""
    record = record_of(data)
    if record is None or not record or rng.random() < 0.25:
        return mutation.of_bytes(data, rng)
    name = rng.choice(sorted(record))
    part: Any = record[name]
    if not part:
        del record[name]
        return on_wire(record)
    entry = rng.choice(sorted(part))
    value: Any = part[entry]
    match value:
        case Array():
            part[entry] = Array(value.dtype, value.shape, value.stype, mutation.of_numpy(value.data, rng))
        case str() if rng.random() < 0.7:
            part[entry] = mutation.of_json(value.encode(), rng).decode(errors="replace")
        case bytes() if rng.random() < 0.7:
            part[entry] = mutation.of_bytes(value, rng)
        case list() if rng.random() < 0.5 and value and isinstance(part, ConfigRecord):
            part[entry] = value * rng.choice((0, 2, 300)) if rng.random() < 0.5 else value[:-1]
        case _:
            _replaced(record, name, entry, rng)
    return on_wire(record)


def _replaced(record: RecordDict, name: str, entry: str, rng: Random) -> None:
    part: Any = record[name]
    try:
        del part[entry]
        part[rng.choice((entry, "other", "a\nb"))] = rng.choice(HOSTILE)
    except (TypeError, ValueError):  # Flower's records are typed
        record[name] = rng.choice((ConfigRecord({entry: "x"}), MetricRecord({entry: float("nan")})))

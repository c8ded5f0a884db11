"""How assignments, replies and registrations travel in Flower's records.

Arrays go as numpy files without pickle (Flower's own encoding), everything else as numbers or one JSON text.
Reading a message never executes anything in it.
"""

import json
import math
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedunfold.config.client import KEY
from fedunfold.core.errors import InputError
from fedunfold.core.settings import shown
from fedunfold.engines.flower.schema import (
    Arrays,
    ClientDescription,
    ClientReply,
    MessageType,
    SumStage,
    TrainInstruction,
)
from fedunfold.engines.flower.serialization import tensors
from fedunfold.io.limits import CLASSES, CLIENT_SAMPLES, DIMENSIONS, FEATURES

MESSAGE_TYPES: dict[MessageType | SumStage, str] = {
    "register": "query.register",
    "train": "train",
    "backprop": "query.backprop",
    "outer": "query.outer",
    "evaluate": "evaluate",
    "measure": "query.measure",
    "inner": "query.inner",
    "advertise": "query.advertise",
    "share": "query.share",
    "mask": "query.mask",
    "unmask": "query.unmask",
}
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def assignment_record(assignment: TrainInstruction, arrays: Arrays) -> RecordDict:
    config = ConfigRecord({"assignment": assignment.model_dump_json()})
    return RecordDict({CONFIG: config, ARRAYS: _array_record(arrays)})


def read_assignment(record: RecordDict) -> tuple[TrainInstruction, dict[str, Tensor]]:
    text = _entry(record.config_records, CONFIG).get("assignment")
    if not isinstance(text, str):
        raise InputError("the request holds no assignment.")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request's assignment is not valid JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise InputError("the request's assignment is no table of settings.")
    return TrainInstruction(**fields), _tensors(record)


def reply_record(reply: ClientReply) -> RecordDict:
    return RecordDict({METRICS: MetricRecord(dict(reply.metrics)), ARRAYS: _array_record(reply.arrays)})


def read_reply(record: RecordDict) -> ClientReply:
    metrics = {}
    for name, value in _entry(record.metric_records, METRICS).items():
        if not isinstance(value, int | float):
            raise InputError(f"the number '{name}' is a list.")
        metrics[name] = float(value)
    return ClientReply(metrics, _tensors(record))


def registration_record(registration: ClientDescription) -> RecordDict:
    return RecordDict(
        {
            CONFIG: ConfigRecord(
                {
                    "key": registration.key,
                    "label-counts": list(registration.label_counts),
                    "features": list(registration.features),
                }
            )
        }
    )


def read_registration(record: RecordDict) -> ClientDescription:
    """What a client says of itself, within bounds."""
    config = _entry(record.config_records, CONFIG)
    key = config.get("key")
    if not (isinstance(key, str) and KEY.fullmatch(key)):
        raise InputError(f"a client registers with the key {shown(key)}; give it one of letters, digits, . - and _.")
    counts, features = (_whole_numbers(config.get(name), name, key) for name in ("label-counts", "features"))
    if len(counts) < 2 or sum(counts) < 1:
        raise InputError(f"client {key} registers {len(counts)} classes of {sum(counts)} samples; it needs 2 and 1.")
    CLASSES.check(len(counts), f"client {key} registers too many classes: ")
    CLIENT_SAMPLES.check(sum(counts), f"client {key} registers too many samples: ")
    DIMENSIONS.check(len(features), f"client {key} registers samples of too many dimensions: ")
    if math.prod(features) < 1:
        raise InputError(f"client {key} registers rows of shape {shown(features)}.")
    FEATURES.check(math.prod(features), f"client {key} registers too large rows: ")
    return ClientDescription(key, counts, features)


def _whole_numbers(values: Any, name: str, key: str) -> tuple[int, ...]:
    if not (isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)):
        raise InputError(f"client {key} registers {name} that are no whole numbers.")
    return tuple(values)


def _array_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in arrays.items()})


def _tensors(record: RecordDict) -> dict[str, Tensor]:
    return tensors(_entry(record.array_records, ARRAYS))


def _entry(records: Any, name: str) -> Any:
    if name not in records:
        raise InputError(f"the record '{name}' is missing.")
    return records[name]

"""How instructions, replies and registrations travel in Flower's records.

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
from fedunfold.engines.flower import schema
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, TrainInstruction
from fedunfold.engines.flower.serialization import tensors
from fedunfold.io.limits import CLASSES, CLIENT_SAMPLES, DIMENSIONS, FEATURES

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
INSTRUCTION = "instruction"


def flower_type(message_type: schema.MessageType | schema.SumStage) -> str:
    """Flower's name for a type of message."""
    return message_type if message_type in ("train", "evaluate") else f"query.{message_type}"


def instruction_record(instruction: TrainInstruction, arrays: Arrays) -> RecordDict:
    """The content of a message to a client."""
    config = ConfigRecord({INSTRUCTION: instruction.model_dump_json()})
    return RecordDict({CONFIG: config, ARRAYS: _array_record(arrays)})


def read_instruction(record: RecordDict) -> tuple[TrainInstruction, dict[str, Tensor]]:
    """What `instruction_record` wrote down."""
    text = entry(record.config_records, CONFIG).get(INSTRUCTION)
    if not isinstance(text, str):
        raise InputError("the message holds no instruction.")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the message's instruction is not valid JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise InputError("the message's instruction is no table of settings.")
    return TrainInstruction(**fields), tensors(entry(record.array_records, ARRAYS))


def reply_record(reply: ClientReply) -> RecordDict:
    """The content of a client's reply."""
    return RecordDict({METRICS: MetricRecord(dict(reply.metrics)), ARRAYS: _array_record(reply.arrays)})


def read_reply(record: RecordDict) -> ClientReply:
    """What `reply_record` wrote down."""
    metrics = {}
    for name, value in entry(record.metric_records, METRICS).items():
        if not isinstance(value, int | float):
            raise InputError(f"the number '{name}' is a list.")
        metrics[name] = float(value)
    return ClientReply(metrics, tensors(entry(record.array_records, ARRAYS)))


def registration_record(description: ClientDescription) -> RecordDict:
    """The content of a client's registration."""
    fields: dict[str, Any] = {
        "client-id": description.client_id,
        "label-counts": list(description.label_counts),
        "feature-shape": list(description.feature_shape),
    }
    return RecordDict({CONFIG: ConfigRecord(fields)})


def read_registration(record: RecordDict) -> ClientDescription:
    """What a client says of itself, within bounds."""
    config = entry(record.config_records, CONFIG)
    name = config.get("client-id")
    if not (isinstance(name, str) and KEY.fullmatch(name)):
        raise InputError(f"a client registers with the id {shown(name)}; give it one of letters, digits, . - and _.")
    counts, shape = (_whole_numbers(config.get(field), field, name) for field in ("label-counts", "feature-shape"))
    if len(counts) < 2:
        raise InputError(f"client {name} registers {len(counts)} classes; a classifier needs at least 2.")
    CLASSES.check(len(counts), f"client {name} registers too many classes: ")
    if sum(counts) < 1:
        raise InputError(f"client {name} registers without samples; it needs at least 1.")
    CLIENT_SAMPLES.check(sum(counts), f"client {name} registers too many samples: ")
    DIMENSIONS.check(len(shape), f"client {name} registers samples of too many dimensions: ")
    if math.prod(shape) < 1:
        raise InputError(f"client {name} registers samples of shape {shown(shape)}.")
    FEATURES.check(math.prod(shape), f"client {name} registers too large samples: ")
    return ClientDescription(name, counts, shape)


def _whole_numbers(values: Any, field: str, client_id: str) -> tuple[int, ...]:
    if not (isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)):
        raise InputError(f"client {client_id} registers {field} that are no whole numbers.")
    return tuple(values)


def _array_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in arrays.items()})


def entry(records: Any, name: str) -> Any:
    """One of a message's records."""
    if name not in records:
        raise InputError(f"the record '{name}' is missing.")
    return records[name]

"""How instructions, replies, registrations and models travel in Flower's records.

Arrays go as numpy files without pickle (Flower's own encoding), everything else as numbers or one JSON text.
Reading a message never executes anything in it. What a client sends is checked before anything is allocated for it: the
header of a numpy file says how large it is, and has to agree with the bytes that came and with what was requested.
"""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedunfold.config.fields import KEY
from fedunfold.core.errors import InputError
from fedunfold.core.settings import shown
from fedunfold.data.npz import read_header
from fedunfold.engines.flower import schema
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, TrainInstruction
from fedunfold.io.limits import CLASSES, CLIENT_SAMPLES, DIMENSIONS, FEATURES, STATISTICS

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
INSTRUCTION = "instruction"
REGISTRATION = "fedunfold-registration"
"""The record in which the train reply of an ordinary Flower client brings its registration."""
SHAPE = "shape:"
"""What the names of inputs come after in a registration."""
TASK_LENGTH = 1000


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
    return RecordDict({CONFIG: description_config(description)})


def description_config(description: ClientDescription) -> ConfigRecord:
    """What a client says of itself, as one record."""
    fields: dict[str, Any] = {
        "client-id": description.client_id,
        "label-counts": list(description.label_counts),
        "task": description.task,
        "statistics": description.num_statistics,
    }
    if description.own_training:
        fields["own-training"] = True
    if description.num_held_out:
        fields["held-out"] = description.num_held_out
    fields |= {f"{SHAPE}{name}": list(shape) for name, shape in description.shapes.items()}
    return ConfigRecord(fields)


def read_registration(record: RecordDict, name: str = CONFIG) -> ClientDescription:
    """What a client says of itself in one of a message's records, within bounds."""
    config = entry(record.config_records, name)
    name = config.get("client-id")
    if not (isinstance(name, str) and KEY.fullmatch(name)):
        raise InputError(f"a client registers with the id {shown(name)}; give it one of letters, digits, . - and _.")
    counts = _whole_numbers(config.get("label-counts"), "label-counts", name)
    CLASSES.check(len(counts), f"client {name} registers too many classes: ")
    if sum(counts) < 1:
        raise InputError(f"client {name} registers without samples; it needs at least 1.")
    CLIENT_SAMPLES.check(sum(counts), f"client {name} registers too many samples: ")
    fields = {key.removeprefix(SHAPE): value for key, value in config.items() if key.startswith(SHAPE)}
    shapes = {key: _whole_numbers(value, "shapes", name) for key, value in fields.items()}
    for shape in shapes.values():
        DIMENSIONS.check(len(shape), f"client {name} registers samples of too many dimensions: ")
        if math.prod(shape) < 1:
            raise InputError(f"client {name} registers samples of shape {shown(shape)}.")
    FEATURES.check(sum(map(math.prod, shapes.values())), f"client {name} registers too large samples: ")
    (statistics,) = _whole_numbers([config.get("statistics")], "statistics", name)
    STATISTICS.check(statistics, f"client {name} registers too many statistics: ")
    (held_out,) = _whole_numbers([config.get("held-out", 0)], "held-out", name)
    CLIENT_SAMPLES.check(held_out, f"client {name} registers too many held-out samples: ")
    task = config.get("task")
    if not (isinstance(task, str) and len(task) <= TASK_LENGTH and task.isprintable()):
        raise InputError(f"client {name} registers the task {shown(task)}; give its name and settings in one line.")
    own_training = config.get("own-training", False)
    if not isinstance(own_training, bool):
        raise InputError(f"client {name} registers {shown(own_training)} for own-training; give true or false.")
    return ClientDescription(name, counts, task, shapes, statistics, own_training, held_out)


def _whole_numbers(values: Any, field: str, client_id: str) -> tuple[int, ...]:
    if not (isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)):
        raise InputError(f"client {client_id} registers {field} that are no whole numbers.")
    return tuple(values)


def read_array(array: Array, name: str) -> np.ndarray:
    """A plain numeric array of at most 8 bytes a number, in this machine's byte order, rows first.

    It is no copy but the bytes that came, and cannot be written to, wherever they have that order.
    """
    file = io.BytesIO(array.data)
    try:
        shape, columns_first, dtype = read_header(file)
    except ValueError as error:
        raise InputError(f"has an array '{name}' that cannot be read") from error
    begin = file.tell()
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise InputError(f"has an array '{name}' of type {dtype}")
    if math.prod(shape) * dtype.itemsize != len(array.data) - begin:
        raise InputError(f"has an array '{name}' of other length than its shape {list(shape)} says")
    values = np.frombuffer(array.data, dtype, math.prod(shape), begin)
    values = values.reshape(shape[::-1]).T if columns_first else values.reshape(shape)
    return values.astype(dtype.newbyteorder("="), order="C", copy=False)


def tensors(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """All arrays of a record."""
    return {name: torch.from_numpy(read_array(array, name).copy()) for name, array in record.items()}


def _array_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in arrays.items()})


def entry(records: Any, name: str) -> Any:
    """One of a message's records."""
    if name not in records:
        raise InputError(f"the record '{name}' is missing.")
    return records[name]

"""How instructions, replies, registrations and models travel in Flower's records.

Arrays go as numpy files without pickle (Flower's own encoding), everything else as numbers or one JSON text.
Reading a message never executes anything in it. What a client sends is checked before anything is allocated for it: the
header of a numpy file says how large it is, and has to agree with the bytes that came and with what was requested.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedunfold.config.fields import KEY
from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout, is_running_statistic
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
Shape = tuple[int, ...]
NARROW, WIDE = np.float32, np.float64


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
    task = config.get("task")
    if not (isinstance(task, str) and len(task) <= TASK_LENGTH and task.isprintable()):
        raise InputError(f"client {name} registers the task {shown(task)}; give its name and settings in one line.")
    return ClientDescription(name, counts, task, shapes, statistics)


def _whole_numbers(values: Any, field: str, client_id: str) -> tuple[int, ...]:
    if not (isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)):
        raise InputError(f"client {client_id} registers {field} that are no whole numbers.")
    return tuple(values)


def read_array(array: Array, name: str) -> np.ndarray:
    """A plain numeric array of at most 8 bytes a number, in this machine's byte order, rows first."""
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
    return values.astype(dtype.newbyteorder("="), order="C")


def tensors(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """All arrays of a record."""
    return {name: torch.from_numpy(read_array(array, name)) for name, array in record.items()}


def _array_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in arrays.items()})


def entry(records: Any, name: str) -> Any:
    """One of a message's records."""
    if name not in records:
        raise InputError(f"the record '{name}' is missing.")
    return records[name]


@dataclass(frozen=True)
class ModelArrays:
    """A model's arrays off the wire.

    Attributes:
        vector: The trained arrays, running statistics at the end, [d]; in double precision where one of them needs it.
        counters: The others, which hold whole numbers.
        types: In which type each array is to be given back: its own, or float64 for the mean of whole numbers.
    """

    vector: Tensor
    counters: Mapping[str, np.ndarray]
    types: Mapping[str, np.dtype[Any]]

    @property
    def is_usable(self) -> bool:
        """Whether the counters are finite; a client may send them as floating-point numbers."""
        return all(bool(np.isfinite(values).all()) for values in self.counters.values())


@dataclass(frozen=True)
class RecordLayout:
    """A model's arrays as the server sent them first.

    Floating-point arrays are what is trained. Arrays of whole numbers, such as the counters of a normalisation layer,
    are averaged beside them, unless there are no others.

    Attributes:
        shapes: Shape of each array.
        trained: Names of the arrays that make up the vector, running statistics at the end.
    """

    shapes: dict[str, Shape]
    trained: tuple[str, ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> "RecordLayout":
        """The layout of a record; one without arrays is refused."""
        try:
            arrays = {name: read_array(array, name) for name, array in record.items()}
        except InputError as error:
            raise InputError(f"the initial model {error}; give arrays of numbers.") from error
        trained = [name for name, values in arrays.items() if values.dtype.kind == "f"] or list(arrays)
        if not trained:
            raise InputError("the initial arrays are empty; give those of a model.")
        return cls({name: a.shape for name, a in arrays.items()}, tuple(sorted(trained, key=is_running_statistic)))

    def read(self, record: ArrayRecord) -> ModelArrays:
        """The arrays of a client.

        Args:
            record: They may be of any numeric type; they are refused where names or shapes are not this layout's.
        """
        if missing := sorted(self.shapes.keys() - record.keys()):
            raise InputError(f"has no array '{missing[0]}', which the initial arrays have")
        if added := sorted(record.keys() - self.shapes.keys()):
            raise InputError(f"has an array '{added[0]}', which the initial arrays do not have")
        arrays = {name: self._checked(record[name], name) for name in self.shapes}
        types = {name: a.dtype if a.dtype.kind == "f" else np.dtype(np.float64) for name, a in arrays.items()}
        wide = any(types[name] == np.float64 for name in self.trained)
        vector = np.concatenate([arrays[name].reshape(-1) for name in self.trained], dtype=WIDE if wide else NARROW)
        counters = {name: a.astype(WIDE) for name, a in arrays.items() if name not in self.trained}
        return ModelArrays(torch.from_numpy(vector), counters, types)

    def record(self, arrays: ModelArrays) -> ArrayRecord:
        """What `read` has read, as named arrays of the types they are to be given back in."""
        pieces = torch.split(arrays.vector, [math.prod(self.shapes[name]) for name in self.trained])
        found = dict(arrays.counters) | {n: piece.numpy() for n, piece in zip(self.trained, pieces, strict=True)}
        return ArrayRecord(
            {name: Array(found[name].astype(arrays.types[name]).reshape(shape)) for name, shape in self.shapes.items()}
        )

    def _checked(self, array: Array, name: str) -> np.ndarray:
        values = read_array(array, name)
        if values.shape != self.shapes[name]:
            raise InputError(
                f"has '{name}' of shape {list(values.shape)} in place of {list(self.shapes[name])}, the initial one"
            )
        return values

    @cached_property
    def params(self) -> ParamLayout:
        """What the entries of the vector are."""
        buffers = tuple(filter(is_running_statistic, self.trained))
        names = tuple(name for name in self.trained if name not in buffers)
        shapes, buffer_shapes = (tuple(torch.Size(self.shapes[name]) for name in some) for some in (names, buffers))
        return ParamLayout(names, shapes, buffers, buffer_shapes)

"""The model that a run trained: loaded in a fresh process without its data, and written in formats of others."""

import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import field_validator
from safetensors.torch import save as serialize
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.fields import TaskField
from fedunfold.config.model import Model, model_factory
from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.core.settings import Count
from fedunfold.core.task import Task
from fedunfold.data.importers.recipe import is_recipe, read_recipe
from fedunfold.io.atomic import is_plain_file, write_atomically
from fedunfold.io.safetensors import UNREADABLE, read_tensors
from fedunfold.runs.reader import DamagedRunError, parse_record, read_file
from fedunfold.runs.schema import MODEL, MODEL_RECORD, Record

Format = Literal["safetensors", "torch-export", "onnx"]
ENDINGS: Mapping[Format, str] = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
NEEDS_ONNX = "this needs the packages onnx and onnxscript; install them with pip install 'fedunfold[onnx]'."


class ModelRecord(Record):
    """model.json: what is needed beside the parameters to build the model and to read new rows.

    Attributes:
        model: What the model is.
        features: The shape of a row.
        task: What it was trained for.
        class_names: The classes in the order of their numbers, where they have names.
        columns: How a table's columns become features (`env new`), where the data came from one.
    """

    model: Model
    features: tuple[Count, ...]
    task: TaskField
    class_names: tuple[str, ...] | None = None
    columns: dict[str, Any] | None = None

    @field_validator("columns")
    @classmethod
    def _is_recipe(cls, columns: dict[str, Any] | None) -> dict[str, Any] | None:
        if columns is not None and not is_recipe(columns):
            raise ValueError("is no recipe")
        return columns

    @classmethod
    def of(cls, environment: Environment, recipe: Path | None = None) -> "ModelRecord":
        """The record of an environment's own model.

        Args:
            environment: The environment.
            recipe: How a table's columns became features; by default the file that `env new` wrote beside the data,
                where there is one.

        Raises:
            InputError: The recipe cannot be read, or makes other features than the model reads.
        """
        data, file = environment.load(), environment.data_file
        if recipe is None and file is not None and is_plain_file(beside := file.with_suffix(".columns.json")):
            recipe = beside
        columns = None if recipe is None else read_recipe(recipe)
        if columns is not None and (made := len(columns["features"])) != math.prod(data.features):
            raise InputError(
                f"{recipe} makes {made} features, but the model reads rows of shape {list(data.features)}; name the "
                "recipe that the data were made with."
            )
        names = environment.class_names or (columns and columns.get("classes")) or None
        if names is not None and len(names) != data.task.num_groups:
            raise InputError(
                f"{recipe} names the classes {', '.join(map(str, names))}, but the task has {data.task.num_groups}; "
                "name the recipe that the data were made with."
            )
        return cls(model=environment.model, features=data.features, task=data.task, class_names=names, columns=columns)


@dataclass(frozen=True)
class TrainedModel:
    """A run's model with what belongs to it.

    Attributes:
        module: The model, ready to predict, on the CPU.
        task: What it was trained for.
        record: What it was built by.
    """

    module: nn.Module
    task: Task
    record: ModelRecord

    @classmethod
    def load(cls, run: str | Path) -> "TrainedModel":
        """From the folder of a run.

        Args:
            run: The folder that `fedunfold run --out` or `RunFolder` wrote.

        Raises:
            InputError: It holds no trained model, or one that is damaged.
        """
        folder = Path(run)
        if not is_plain_file(folder / MODEL) or not is_plain_file(folder / MODEL_RECORD):
            raise InputError(f"{folder} holds no trained model; name the folder of a finished run of one method.")
        record = parse_record(ModelRecord, read_file(folder / MODEL_RECORD), folder / MODEL_RECORD)
        module = model_factory(record.model, record.features, record.task.num_outputs)()
        try:
            module.load_state_dict(read_tensors(folder / MODEL, "pt")[0])
        except UNREADABLE as error:
            raise DamagedRunError(folder / MODEL, "is damaged or of another model") from error
        return cls(module.eval(), record.task, record)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """The model's outputs for rows [B, …]."""
        found: Tensor = self.module(x)
        return found

    def export(self, file: Path, to: Format) -> None:
        """Write the model.

        Args:
            file: The file.
            to: "safetensors" (parameters by name), "torch-export" (a program that torch loads without this package) or
                "onnx"; the number of rows stays open.

        Raises:
            InputError: The model cannot be written so, or a package is missing.
        """
        if to == "safetensors":
            content = serialize({name: tensor.contiguous() for name, tensor in self.module.state_dict().items()})
        else:
            content = self._program(to)
        write_atomically(file, lambda temporary: temporary.write_bytes(content))

    def _program(self, to: Format) -> bytes:
        dtype = torch.int64 if self.task.keeps_integers else torch.float32
        example = torch.zeros(2, *self.record.features, dtype=dtype)
        rows = {0: torch.export.Dim("rows")}
        buffer = io.BytesIO()
        if to == "onnx":
            import_extra("onnxscript", NEEDS_ONNX)
        try:
            with _silenced():
                program = torch.export.export(self.module, (example,), dynamic_shapes=(rows,))
                if to == "torch-export":
                    torch.export.save(program, buffer)
                else:
                    written = torch.onnx.export(program, dynamo=True, verbose=False)
                    assert written is not None
                    buffer.write(written.model_proto.SerializeToString())
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"the model cannot be written as {to}: {reason}; take safetensors.") from error
        return buffer.getvalue()


@contextmanager
def _silenced() -> Iterator[None]:
    """Without what torch's exporters say of themselves: deprecations, and packages that they do not find."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def load_model(run: str | Path) -> nn.Module:
    """The model that a run trained, from its folder alone: no data, no environment file.

    Args:
        run: The folder of a finished run of one method.

    Returns:
        The module, ready to predict, on the CPU.

    >>> import tempfile
    >>> import fedunfold as fu
    >>> from fedunfold.runs.artifacts import of_run
    >>> env = fu.environment("digits-label-skew").replace(rounds=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, write in of_run(env, fu.method("fedavg"), fu.run(env)).items():
    ...         _ = write(Path(folder, name))
    ...     fu.load_model(folder)[-1]
    Linear(in_features=32, out_features=10, bias=True)
    """
    return TrainedModel.load(run).module

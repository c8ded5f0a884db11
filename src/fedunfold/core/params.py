"""A model as one vector w in R^d: its trainable parameters, and after them the buffers that training changes.

Frozen parameters are no part of it: they are not sent, they are shared by all copies of a model, and those in half
precision stay in it.
"""

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fedunfold.core import rng
from fedunfold.core.errors import InputError

ModelFactory = Callable[[], nn.Module]
"""A function that builds a fresh model, such as ``lambda: Net()``."""
HALF = (torch.bfloat16, torch.float16)
NORMALIZATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
)


@dataclass(frozen=True)
class ParamLayout:
    """What the entries of a model's vector are.

    Buffers are running means and variances of normalisation layers: no gradient moves them, training does. They are
    averaged with Θ as they are: no server optimiser, no step size, none from memory.

    Attributes:
        names: Names of the trainable parameters, in the order they lie in.
        shapes: Their shapes.
        buffer_names: Names of the buffers, which come after them.
        buffer_shapes: Their shapes.
        normalization: Names of the parameters and buffers that are a normalisation layer's, where that is known.

    >>> layout = ParamLayout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    >>> layout.num_params, layout.num_buffer_entries, layout.buffer_names
    (12, 4, ('1.running_mean', '1.running_var'))
    """

    names: tuple[str, ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    buffer_names: tuple[str, ...] = ()
    buffer_shapes: tuple[torch.Size, ...] = ()
    normalization: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> "ParamLayout":
        """The layout of a module."""
        params, buffers = _trainable(module), _running_statistics(module)
        layers = {name for name, layer in module.named_modules() if isinstance(layer, NORMALIZATION)}
        return cls(
            tuple(params),
            tuple(param.shape for param in params.values()),
            tuple(buffers),
            tuple(buffer.shape for buffer in buffers.values()),
            frozenset(name for name in (*params, *buffers) if name.rpartition(".")[0] in layers),
        )

    @cached_property
    def num_params(self) -> int:
        """How many entries are trainable parameters."""
        return sum(shape.numel() for shape in self.shapes)

    @cached_property
    def num_buffer_entries(self) -> int:
        """How many entries, the last ones, are buffers."""
        return sum(shape.numel() for shape in self.buffer_shapes)

    @property
    def size(self) -> int:
        """d."""
        return self.num_params + self.num_buffer_entries

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """How many entries each layer has, which is one module's parameters: `l1.weight` and `l1.bias`."""
        module_of = [name.rpartition(".")[0] for name in self.names]
        pairs = zip(module_of, self.shapes, strict=True)
        return tuple(sum(shape.numel() for _, shape in own) for _, own in groupby(pairs, lambda pair: pair[0]))

    def split_layers(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """The layers [..., d_l] of vectors [..., d], without buffers; all as one where nothing is known of them."""
        params = self.params(vectors)
        return torch.split(params, list(self.layer_sizes) or params.shape[-1], -1)

    def params(self, vectors: Tensor) -> Tensor:
        """The part [..., num_params] of vectors [..., d] that is trained."""
        return vectors[..., : vectors.shape[-1] - self.num_buffer_entries]

    def buffers(self, vectors: Tensor) -> Tensor:
        """The part [..., num_buffer_entries] of vectors [..., d] that is buffers."""
        return vectors[..., vectors.shape[-1] - self.num_buffer_entries :]

    def with_buffers(self, vectors: Tensor, buffers: Tensor) -> Tensor:
        """Vectors [..., d] with other buffers [..., num_buffer_entries]; themselves where there are none."""
        return torch.cat([self.params(vectors), buffers], -1) if self.num_buffer_entries else vectors

    def check(self, vectors: Tensor, name: str) -> None:
        """Refuse vectors of another length."""
        if vectors.shape[-1:] != (self.size,):
            raise InputError(f"{name} has {vectors.shape[-1]} entries, where this federation's model has {self.size}.")


def seeded(build: ModelFactory, seed: int, run: str) -> nn.Module:
    """The model that a run starts from: built under a seed of its own, leaving torch's generator alone."""
    drawn = rng.integer(seed, "model", run)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(drawn)
        if torch.cuda.is_available():  # elsewhere torch would queue the seeds, more of them every time
            torch.cuda.manual_seed_all(drawn)
        return build()


def flatten_model(module: nn.Module) -> Tensor:
    """w [d] of a module."""
    parts = [*_trainable(module).values(), *_running_statistics(module).values()]
    return torch.cat([part.detach().flatten() for part in parts])


@torch.no_grad()
def load_model(module: nn.Module, model: Tensor) -> None:
    """Put a vector w [d] into a module."""
    parts = [*_trainable(module).values(), *_running_statistics(module).values()]
    for part, values in zip(parts, torch.split(model, [part.numel() for part in parts]), strict=True):
        part.copy_(values.view(part.shape))


def copy_model(module: nn.Module) -> nn.Module:
    """A copy with trainable parameters of its own; frozen ones are shared, so that a large base is there once."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), False) for p in _frozen(module).values()}
    return copy.deepcopy(module, shared)


def place_model(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a module to a device and compute with it in a type; frozen parameters in half precision stay in theirs.

    Where there are such parameters, every layer gets its inputs in the type of its own.
    """
    kept = {id(p) for p in _frozen(module).values() if p.dtype in HALF}
    if not kept:
        return module.to(device, dtype)
    for tensor in (*module.to(device).parameters(), *module.buffers()):
        if tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(dtype)
    for layer in module.modules():
        if _own_type(layer) is not None and _cast_inputs not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    return module


def _cast_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Inputs with a fraction in the type of a layer's parameters."""
    dtype = _own_type(layer)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _own_type(layer: nn.Module) -> torch.dtype | None:
    """The type of a layer's own parameters; None where it has none."""
    return next((p.dtype for p in layer.parameters(recurse=False) if p.is_floating_point()), None)


def frozen_digest(module: nn.Module) -> str:
    """Stands for everything in a model that is not trained; empty where all of it is."""
    constants = {name: buffer for name, buffer in module.named_buffers() if not is_running_statistic(name)}
    fixed = _frozen(module) | {n: b for n, b in constants.items() if not n.endswith("num_batches_tracked")}
    lines = [f"{name} {tensor.dtype} {list(tensor.shape)} {fingerprint(tensor)}" for name, tensor in fixed.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if not param.requires_grad}


def _trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Buffers under the names that torch's normalisation layers use."""
    return {name: buffer for name, buffer in module.named_buffers() if is_running_statistic(name)}


def is_running_statistic(name: str) -> bool:
    """Whether a buffer has one of the names that torch's normalisation layers use for their running statistics."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def fingerprint(tensor: Tensor) -> str:
    """Stands for a tensor's values."""
    values = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def device_of(given: str | torch.device) -> torch.device:
    """The device of that name, where it can be used here."""
    name = str(given)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"unknown device '{name}'; choose cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device '{name}' cannot be used here; choose cpu, or cuda on a machine with one.") from error
    return device


def checked_factory(model: object) -> ModelFactory | None:
    """What a user gave as the model, where it builds one."""
    if isinstance(model, nn.Module):
        raise InputError("pass a function that builds the model, such as `lambda: Net()`, not a built one.")
    if not (model is None or callable(model)):
        raise InputError(f"the model is a function that builds one, such as `lambda: Net()`, not {model!r}.")
    return model


def full_precision(module: nn.Module) -> torch.dtype:
    """The type that trained parameters are handed out in: the builder's, or float32 where that is half of it."""
    built = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    return torch.promote_types(built, torch.float32)

"""A model as one vector w in R^d: its trainable parameters, and after them the buffers that training changes."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedunfold.core import rng
from fedunfold.core.errors import InputError

ModelFactory = Callable[[], nn.Module]
"""A function that builds a fresh model, such as ``lambda: Net()``."""


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

    >>> layout = ParamLayout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    >>> layout.num_params, layout.num_buffer_entries, layout.buffer_names
    (12, 4, ('1.running_mean', '1.running_var'))
    """

    names: tuple[str, ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    buffer_names: tuple[str, ...] = ()
    buffer_shapes: tuple[torch.Size, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> "ParamLayout":
        """The layout of a module."""
        params, buffers = _trainable(module), _running_statistics(module)
        return cls(
            tuple(params),
            tuple(param.shape for param in params.values()),
            tuple(buffers),
            tuple(buffer.shape for buffer in buffers.values()),
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


def _trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Buffers of layers that keep them under the names torch's normalisation layers use."""
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var")
    }


def fingerprint(tensor: Tensor) -> str:
    """Stands for a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


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

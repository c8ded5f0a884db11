"""The CUDA kernels beside this file, compiled for one model's shape when they are first needed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger("fedunfold")

THREADS = 256
CLUSTER_BLOCKS = 8  # what every device with clusters allows
TENSOR_CORE_BLOCKS, TENSOR_CORE_THREADS = 2, 256
FIRST_WITH_CLUSTERS = (9, 0)  # compute capability
MAX_LAYERS = 3
HERE = Path(__file__).parent
Name = Literal["forward", "backward", "forward_tensor_cores"]
Launch = Callable[[int, Sequence[Any]], None]
TENSOR_CORE_HEADERS = ("tensor_core_tiles.cuh", "tensor_core_first_layer.cuh", "tensor_core_upper_layers.cuh")
SOURCES: dict[Name, tuple[str, ...]] = {
    "forward": ("mlp.cuh", "cluster.cuh", "forward_layers.cuh", "forward.cu"),
    "backward": ("mlp.cuh", "cluster.cuh", "backward_layers.cuh", "backward.cu"),
    "forward_tensor_cores": ("mlp.cuh", *TENSOR_CORE_HEADERS, "forward_tensor_cores.cu"),
}

# What `forward_tensor_cores.cu` has room for: groups of features in a warp's registers, all else in shared memory.
MAX_REGISTER_GROUPS = 4
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class KernelConfig:
    """What a kernel is compiled for.

    Attributes:
        features: Numbers of a sample.
        outputs: Units of every linear layer.
        rows: Samples of a minibatch.
        prox: Whether steps are pulled towards the start.
        balanced: Whether the outer loss weights classes.
        sums_gradients: Whether outer gradients are summed.
        saves_activations: Whether local training saves what its backward pass needs.
    """

    features: int
    outputs: tuple[int, ...]
    rows: int
    prox: bool = False
    balanced: bool = False
    sums_gradients: bool = False
    saves_activations: bool = False

    @property
    def layers(self) -> int:
        """The number of linear layers."""
        return len(self.outputs)

    def threads(self, name: Name) -> int:
        """Of a block. With one layer each has less to do between two waits, and more of them hide these better."""
        if name == "forward_tensor_cores":
            return TENSOR_CORE_THREADS
        return 2 * THREADS if self.layers == 1 else THREADS

    def loss_sums(self, name: Name) -> int:
        """How many sums of losses a launch returns for every client slot: one for each warp."""
        return blocks(name) * self.threads(name) // 32

    @property
    def second(self) -> int:
        """Units of the second of three layers."""
        return self.outputs[1] if self.layers == MAX_LAYERS else 0

    def shared_bytes(self, name: Name) -> int:
        """The shared memory of a block; a kernel's source does not compile if it needs another amount."""
        if name == "forward_tensor_cores":
            return self._tensor_core_bytes(self.register_groups)
        features, units = _up(_share(self.features), 8), _up(self.outputs[0], 8)
        padded, own = _up(self.rows, 4), _up(_share(self.rows), 4)
        arrays = [features * units, units, padded * features, 4 * padded, padded * units]
        above, classes = self.second or self.outputs[-1], self.outputs[-1]
        share = _up(_share(above), 4)
        if name == "backward":
            top = _up(classes, 4)
            if self.layers > 1:
                arrays += 2 * [share * (units + 4), share, padded * units, padded * share, padded * share]
            if self.layers == MAX_LAYERS:
                arrays += 2 * [top * share, top, padded * top, padded * top]
            return _bytes(arrays)
        if self.layers > 1:
            arrays += [above * (units + 4), above, padded * units, units * own, padded * share, above * own]
        if self.layers == MAX_LAYERS:
            arrays += [classes * (self.second + 1), classes, padded * share, above * own]
            arrays += [padded * classes, classes * own]
        return _bytes(arrays)

    @property
    def saved_per_step(self) -> int:
        """Numbers that a step of a client slot saves: the weights above the first layer, and its outputs."""
        above = sum(out * (below + 1) for below, out in pairwise(self.outputs))
        return _up(above, 4) + self.rows * _up(self.outputs[0], 8)

    @property
    def scratch(self) -> int:
        """Numbers that the sums of a slot's first layer need at most while they are in the threads' order."""
        largest_tile, threads = 64, self.threads("forward")
        return CLUSTER_BLOCKS * (_up(_share(self.features), 8) * _up(self.outputs[0], 8) + threads * largest_tile)

    def fits(self, shared_bytes: int) -> bool:
        """Whether blocks with so much shared memory can train."""
        reads_labels = self.rows <= self.threads("forward")  # a thread that of one row
        return self.layers <= MAX_LAYERS and reads_labels and self.shared_bytes("forward") <= shared_bytes

    @property
    def register_groups(self) -> int:
        """Groups of 16 features whose weights a warp has in registers, because shared memory has no room for them."""
        groups = range(MAX_REGISTER_GROUPS)
        return next((n for n in groups if self._tensor_core_bytes(n) <= MAX_SHARED_BYTES), MAX_REGISTER_GROUPS)

    def fits_tensor_cores(self, shared_bytes: int) -> bool:
        """Whether two blocks with so much shared memory can train on tensor cores."""
        plain = self.layers == MAX_LAYERS and not self.prox and not self.sums_gradients
        small = plain and max(self.outputs[:2]) <= 128 and self.outputs[2] <= 16 and 8 < self.rows <= 64
        whole = self.features % 4 == 0 and self.register_groups < _up(self.features, 16) // 64
        return small and whole and self.shared_bytes("forward_tensor_cores") <= shared_bytes

    def _tensor_core_bytes(self, register_groups: int) -> int:
        rows, groups = _up(self.rows, 8), _up(self.features, 16) // 16
        units, own, classes = _up(self.outputs[0], 64), _up(self.second, 32) // 2, 16
        stored = (groups + 3) // 4 + (groups + 1) // 4 - 2 * register_groups
        weights = [stored * 16 * units, own * (units + 4), classes * (own + 4), units, own, classes]
        return _bytes([*weights, rows * (units + 4), rows * (own + 4), rows * (classes + 4), 2 * 4 * rows])

    def fits_backward(self, shared_bytes: int) -> bool:
        """Whether blocks with so much shared memory can run the backward pass, which has no proximal term."""
        return not self.prox and self.fits(shared_bytes) and self.shared_bytes("backward") <= shared_bytes

    def macros(self, name: Name) -> list[str]:
        """The options that a kernel is compiled with."""
        values = {
            "LAYERS": self.layers,
            "ROWS": self.rows,
            "FEATURES": self.features,
            "FIRST": self.outputs[0],
            "SECOND": self.second,
            "CLASSES": self.outputs[-1],
            "BLOCKS": blocks(name),
            "THREADS": self.threads(name),
            "REGISTER_GROUPS": self.register_groups,
            "PROX": int(self.prox),
            "BALANCED": int(self.balanced),
            "SUMS": int(self.sums_gradients),
            "SAVE": int(self.saves_activations),
            "SHARED_BYTES": self.shared_bytes(name),
        }
        return [f"-D{macro}={value}" for macro, value in values.items()]


@lru_cache(maxsize=64)
def compile_kernel(name: Name, config: KernelConfig, device: torch.device) -> Launch:
    """Compile a kernel, once in a process.

    Args:
        name: Which one.
        config: What it is compiled for.
        device: Where it will run.

    Returns:
        Launches it for so many client slots with its arguments; a kernel knows of a tensor only its address.
    """
    source = "".join((HERE / part).read_text(encoding="utf-8") for part in ("primitives.cuh", *SOURCES[name]))
    of_slot, threads, shared_bytes = blocks(name), config.threads(name), config.shared_bytes(name)
    with torch.cuda.device(device):
        kernel = _compile(source, name, ["--std=c++17", *config.macros(name)])
        kernel.set_shared_memory_config(shared_bytes)

    def launch(slots: int, arguments: Sequence[Any]) -> None:
        if not all(argument.is_contiguous() for argument in arguments if isinstance(argument, Tensor)):
            raise ValueError("a kernel reads and writes contiguous tensors only.")
        with torch.cuda.device(device):
            kernel((slots * of_slot, 1, 1), (threads, 1, 1), list(arguments), shared_bytes)

    return launch


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a block can have on a device.

    Returns:
        0 where the device has no clusters, or torch cannot compile for it.
    """
    if torch.cuda.get_device_capability(device) < FIRST_WITH_CLUSTERS:
        return 0
    try:
        with torch.cuda.device(device):
            _compile('extern "C" __global__ void probe() {}', "probe", [])
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        log.warning("rounds are not computed in one launch, because torch cannot compile here: %s", error)
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many there are on a device; each has room for one block."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def blocks(name: Name) -> int:
    """Thread blocks that train one client slot."""
    return TENSOR_CORE_BLOCKS if name == "forward_tensor_cores" else CLUSTER_BLOCKS


def _compile(source: str, name: str, options: list[str]) -> Any:
    # Private, because torch has no public name for the NVRTC that it brings along; without it users would need nvcc.
    # Where a later torch has no such function or calls it otherwise, `shared_memory` notices and torch trains.
    compile_source: Any = torch.cuda._compile_kernel
    return compile_source(source, name, nvcc_options=options)


def _share(n: int) -> int:
    """What one block of a cluster has of n."""
    return -(-n // CLUSTER_BLOCKS)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _bytes(arrays: list[int]) -> int:
    """Of arrays of numbers, each beginning at a multiple of 16 bytes."""
    return sum(4 * _up(size, 4) for size in arrays)

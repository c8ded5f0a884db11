"""The CUDA kernels beside this file, compiled for one model's shape when they are first needed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger("fedunfold")

THREADS = 256
PARTS = 8  # programs of a cluster: what every device with clusters allows
PAIR, PAIR_THREADS = 2, 256  # the same where tensor cores make the walk
FIRST_WITH_CLUSTERS = (9, 0)  # compute capability
MOST_LAYERS = 3
HERE = Path(__file__).parent
Name = Literal["forward", "backward", "pair"]
SOURCES: dict[Name, tuple[str, ...]] = {
    "forward": ("mlp.cuh", "cluster.cuh", "forward.cu"),
    "backward": ("mlp.cuh", "cluster.cuh", "backward.cu"),
    "pair": ("mlp.cuh", "forward_tensor_cores.cu"),
}

# What `forward_tensor_cores.cu` can hold: sixteens of features in a warp's registers, all else in shared memory.
MOST_HELD = 4
MOST_SHARED = 227 * 1024


@dataclass(frozen=True)
class Shape:
    """What a launch is compiled for: the sizes of a stack of linear layers and of its minibatches, the loss, whether
    outer gradients are added up, and whether what the walk back needs is kept on a tape."""

    features: int
    outputs: tuple[int, ...]
    rows: int
    prox: bool = False
    balanced: bool = False
    sums: bool = False
    tape: bool = False

    @property
    def layers(self) -> int:
        return len(self.outputs)

    def threads(self, name: Name) -> int:
        """Of a program. With one layer each has less to do between two waits, and more of them hide these better."""
        if name == "pair":
            return PAIR_THREADS
        return 2 * THREADS if self.layers == 1 else THREADS

    def sums_of_losses(self, name: Name) -> int:
        """That a launch leaves of every lane: one for each warp."""
        return parts(name) * self.threads(name) // 32

    @property
    def second(self) -> int:
        """Units of the second of three layers."""
        return self.outputs[1] if self.layers == MOST_LAYERS else 0

    def shared_bytes(self, name: Name) -> int:
        """What a kernel keeps in shared memory; its source refuses to compile where this is not so."""
        if name == "pair":
            return self._pair_bytes(self.held)
        slice_, units = _up(_parts(self.features), 8), _up(self.outputs[0], 8)
        padded, own = _up(self.rows, 4), _up(_parts(self.rows), 4)
        held = [slice_ * units, units, padded * slice_, 4 * padded, padded * units]
        above, classes = self.second or self.outputs[-1], self.outputs[-1]
        share = _up(_parts(above), 4)
        if name == "backward":
            tops = _up(classes, 4)
            if self.layers > 1:
                held += 2 * [share * (units + 4), share, padded * units, padded * share, padded * share]
            if self.layers == MOST_LAYERS:
                held += 2 * [tops * share, tops, padded * tops, padded * tops]
            return _bytes(held)
        if self.layers > 1:
            held += [above * (units + 4), above, padded * units, units * own, padded * share, above * own]
        if self.layers == MOST_LAYERS:
            held += [classes * (self.second + 1), classes, padded * share, above * own]
            held += [padded * classes, classes * own]
        return _bytes(held)

    @property
    def record(self) -> int:
        """Numbers that a step of a lane leaves on the tape: the weights above the first layer, and its outputs."""
        above = sum(out * (below + 1) for below, out in pairwise(self.outputs))
        return _up(above, 4) + self.rows * _up(self.outputs[0], 8)

    @property
    def scratch(self) -> int:
        """Numbers that the sums of a lane's first layer need at most while they are in the threads' order."""
        largest_tile, threads = 64, self.threads("forward")
        return PARTS * (_up(_parts(self.features), 8) * _up(self.outputs[0], 8) + threads * largest_tile)

    def fits(self, shared_bytes: int) -> bool:
        """Whether the walk can be made by programs with so much shared memory."""
        reads_labels = self.rows <= self.threads("forward")  # a thread that of one row
        return self.layers <= MOST_LAYERS and reads_labels and self.shared_bytes("forward") <= shared_bytes

    @property
    def held(self) -> int:
        """Sixteens of features whose weights a warp of a pair keeps in registers, because memory does not hold them."""
        return next((held for held in range(MOST_HELD) if self._pair_bytes(held) <= MOST_SHARED), MOST_HELD)

    def fits_pair(self, shared_bytes: int) -> bool:
        """Whether the walk can be made by two programs on tensor cores."""
        plain = self.layers == MOST_LAYERS and not self.prox and not self.sums
        small = plain and max(self.outputs[:2]) <= 128 and self.outputs[2] <= 16 and 8 < self.rows <= 64
        whole = self.features % 4 == 0 and self.held < _up(self.features, 16) // 64
        return small and whole and self.shared_bytes("pair") <= shared_bytes

    def _pair_bytes(self, held: int) -> int:
        rows, sixteens = _up(self.rows, 8), _up(self.features, 16) // 16
        units, own, classes = _up(self.outputs[0], 64), _up(self.second, 32) // 2, 16
        laid = (sixteens + 3) // 4 + (sixteens + 1) // 4 - 2 * held
        weights = [laid * 16 * units, own * (units + 4), classes * (own + 4), units, own, classes]
        return _bytes([*weights, rows * (units + 4), rows * (own + 4), rows * (classes + 4), 2 * 4 * rows])

    def fits_backward(self, shared_bytes: int) -> bool:
        """The same of the walk back, which knows nothing of a pull towards the start."""
        return not self.prox and self.fits(shared_bytes) and self.shared_bytes("backward") <= shared_bytes

    def macros(self, name: Name) -> list[str]:
        values = {
            "LAYERS": self.layers,
            "ROWS": self.rows,
            "FEATURES": self.features,
            "FIRST": self.outputs[0],
            "SECOND": self.second,
            "CLASSES": self.outputs[-1],
            "PARTS": parts(name),
            "THREADS": self.threads(name),
            "HELD": self.held,
            "PROX": int(self.prox),
            "BALANCED": int(self.balanced),
            "SUMS": int(self.sums),
            "TAPE": int(self.tape),
            f"{name.upper()}_BYTES": self.shared_bytes(name),
        }
        return [f"-D{macro}={value}" for macro, value in values.items()]


@dataclass(frozen=True)
class Launch:
    """A kernel with the shared memory it takes."""

    kernel: Any
    programs: int  # of a lane
    threads: int
    shared_bytes: int
    device: torch.device

    def __call__(self, lanes: int, arguments: Sequence[Any]) -> None:
        """A kernel knows of a tensor only where it begins."""
        if not all(argument.is_contiguous() for argument in arguments if isinstance(argument, Tensor)):
            raise ValueError("a kernel reads and writes contiguous tensors only.")
        with torch.cuda.device(self.device):
            self.kernel((lanes * self.programs, 1, 1), (self.threads, 1, 1), list(arguments), self.shared_bytes)


@lru_cache(maxsize=64)
def compiled(name: Name, shape: Shape, device: torch.device) -> Launch:
    """A kernel for a shape and a device."""
    source = "".join((HERE / part).read_text(encoding="utf-8") for part in ("primitives.cuh", *SOURCES[name]))
    with torch.cuda.device(device):
        kernel = _compile(source, name, ["--std=c++17", *shape.macros(name)])
        kernel.set_shared_memory_config(shape.shared_bytes(name))
    return Launch(kernel, parts(name), shape.threads(name), shape.shared_bytes(name), device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have on a device; 0 where it has no clusters, or there is no compiler for it."""
    if torch.cuda.get_device_capability(device) < FIRST_WITH_CLUSTERS:
        return 0
    try:
        with torch.cuda.device(device):
            _compile('extern "C" __global__ void probe() {}', "probe", [])
    except (AttributeError, OSError, RuntimeError) as error:
        log.warning("rounds are not made in one launch, because torch cannot compile here: %s", error)
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Each has room for one program."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def parts(name: Name) -> int:
    """Programs that make the walk of one lane."""
    return PAIR if name == "pair" else PARTS


def _compile(source: str, name: str, options: list[str]) -> Any:
    # torch gives no public name to the compiler that comes with it.
    compile_kernel: Any = torch.cuda._compile_kernel
    return compile_kernel(source, name, nvcc_options=options)


def _parts(n: int) -> int:
    """What one program has of n."""
    return -(-n // PARTS)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _bytes(arrays: list[int]) -> int:
    """Of arrays of numbers, each beginning at a multiple of 16 bytes."""
    return sum(4 * _up(size, 4) for size in arrays)

"""The GPU's walk against the reference walk: its source on an emulated GPU in double precision, itself where there is
a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedunfold.engines.simulation import SimulatedFederation, backend
from fedunfold.engines.simulation.backends.cuda import CudaTrainer, is_supported, jit
from fedunfold.engines.simulation.backends.cuda import local_training as fused_walk
from fedunfold.engines.simulation.backends.cuda.jit import HERE, SOURCES, Launch, Name, Shape, shared_memory
from fedunfold.local.optimizers import LocalOptimizer, sgd
from tests.support.comparing import BATCH, CASES, CPU, LANES, Comparison, learned, stack, unequal

WITH_GPU = torch.cuda.is_available() and shared_memory(torch.device("cuda")) > 0
HOPPER = 227 * 1024
MEMORY, OWN_MEMORY = "extern __shared__ __align__(16) char memory[];", "char* memory = own_memory();"


class Emulated(Launch):
    """A launch that needs no device."""

    def __call__(self, lanes: int, arguments: Sequence[Any]) -> None:
        self.kernel((lanes,), (1,), list(arguments), 0)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Name]:
    """Let launches go to the kernels' source, compiled for the CPU. Gives the names of those that were launched."""
    launched: list[Name] = []
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated GPU with")
    monkeypatch.setattr(jit, "THREADS", 64)  # fewer to emulate, and more than one round of most loops
    tests = Path(__file__).parent

    @cache
    def built(name: Name, shape: Shape) -> Any:
        source = "".join((HERE / part).read_text() for part in SOURCES[name])
        assert MEMORY in source
        source = source.replace(MEMORY, OWN_MEMORY).replace("alignas(16)", "alignas(sizeof(Quad))")
        made = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"  # one loaded already must not be written over
        written, library = made.with_suffix(".cpp"), made.with_suffix(".so")
        written.write_text(f'#include "{tests}/emulated_gpu.h"\n{source}\n#include "{tests}/emulated_launches.h"\n')
        macros = [macro for macro in shape.macros(name) if "_BYTES" not in macro]
        if name != "backward":
            macros.append(f"-DWALK={name}")
        options = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-shared", "-fPIC", *macros]
        subprocess.run([compiler, *options, "-o", str(library), str(written)], check=True)
        symbol = "emulated_backward" if name == "backward" else "emulated_walk"
        return getattr(ctypes.CDLL(str(library)), symbol)

    def compiled(name: Name, shape: Shape, device: torch.device) -> Launch:
        kernel = built(name, shape)
        launched.append(name)

        def launch(_grid: object, _block: object, arguments: list[Any], _bytes: int) -> None:
            kernel(*(_argument(argument) for argument in arguments))

        return Emulated(launch, 1, 1, 0, device)

    monkeypatch.setattr(fused_walk, "compiled", compiled)
    monkeypatch.setattr(fused_walk, "shared_memory", lambda device: HOPPER)
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: 132)
    return launched


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int(value)


@pytest.mark.parametrize(("sides", "update", "outer"), CASES)
def test_the_gpu_source_walks_as_the_reference(
    emulated_gpu: list[Name], sides: tuple[int, ...], update: LocalOptimizer, outer: str | None
) -> None:
    Comparison(CudaTrainer).check(sides, update, outer, 1e-12)
    assert emulated_gpu == (["forward"] if update.mu else ["forward", "forward", "backward"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(
            (name, Shape(*sizes))
            for name in get_args(Name)
            for sizes in [(784, (128, 128, 10), 50), (64, (40, 24, 5), 9)]
        ),
        *(
            (name, Shape(*sizes))
            for name in ("forward", "backward")
            for sizes in [(192, (120,), 100), (33, (17, 5), 7)]
        ),
    ],
)
def test_shared_memory_is_what_the_source_takes(tmp_path: Path, name: Name, shape: Shape) -> None:
    """A source with other sizes than are asked for refuses to compile."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels' source with")
    source, tests = "".join((HERE / part).read_text() for part in SOURCES[name]), Path(__file__).parent
    file = tmp_path / "kernel.cpp"
    file.write_text(f'#include "{tests}/emulated_gpu.h"\n{source.replace(MEMORY, OWN_MEMORY)}')
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", "-DREAL=float", *shape.macros(name), str(file)]
    subprocess.run(command, check=True)
    wrong = [
        f"-D{name.upper()}_BYTES={shape.shared_bytes(name) + 16}" if "_BYTES" in part else part for part in command
    ]
    assert "static assertion failed" in subprocess.run(wrong, capture_output=True, text=True, check=False).stderr


@pytest.mark.usefixtures("emulated_gpu")
def test_what_is_kept_for_the_way_back_stays_within_the_budget() -> None:
    """Of every step of three lanes 5 · 33 + 5 numbers of the layer above the first, padded to 172, and of 18 rows the
    first layer's 33 outputs, padded to 40."""
    walk = CudaTrainer(*Comparison(CudaTrainer)._parts((20, 33, 5), sgd(), "path", CPU, torch.float64))
    kept = len(walk.schedule.active) * 3 * (172 + 18 * 40) * 8
    assert walk.supports_backward(kept)
    assert not walk.supports_backward(kept - 1)


@pytest.mark.parametrize(
    ("sides", "outer", "held"),
    [
        pytest.param((64, 40, 24, 5), None, 0, id="in shared memory"),
        pytest.param((64, 40, 24, 5), "path", 0, id="path"),
        pytest.param((64, 40, 24, 5), "balanced", 0, id="balanced"),
        pytest.param((132, 20, 70, 16), "final", 1, id="some in registers, padded"),
        pytest.param((208, 128, 128, 10), None, 2, id="the largest layers"),
    ],
)
def test_a_pairs_source_walks_as_the_reference(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch, sides: tuple[int, ...], outer: str | None, held: int
) -> None:
    shape = Shape(sides[0], sides[1:], BATCH)
    monkeypatch.setattr(jit, "MOST_SHARED", shape._pair_bytes(held))
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: LANES * jit.PARTS - 1)
    assert shape.held == held
    Comparison(CudaTrainer).check(sides, sgd(), outer, 1e-12, gradients=False, back=False)
    assert emulated_gpu == ["pair"]


def test_a_lane_of_a_pair_that_diverges_does_so_alone_and_says_so(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: 1)
    Comparison(CudaTrainer).check((64, 40, 24, 5), sgd(), None, 1e-12, back=False, spoilt=True)
    assert emulated_gpu == ["pair"]


@pytest.mark.usefixtures("emulated_gpu")
def test_more_rows_than_pairs_can_count_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: 1)
    parts = Comparison(CudaTrainer)._parts((64, 40, 24, 5), sgd(), None, CPU, torch.float64)
    walk, shape = CudaTrainer(*parts), Shape(64, (40, 24, 5), BATCH)
    assert walk._goes_in_pairs(shape, LANES)
    assert not replace(walk, x=torch.empty(2**26, 64, device="meta"))._goes_in_pairs(shape, LANES)


def test_lanes_go_in_pairs_where_they_have_no_room_for_more(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: LANES * jit.PARTS)
    Comparison(CudaTrainer).check((64, 40, 24, 5), sgd(), None, 1e-12, back=False)
    assert emulated_gpu == ["forward"]


def test_a_learning_by_the_gpu_source_is_the_references(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine hands to a launch and makes of what comes back."""
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    walked: list[object] = []

    def can(*asked: object) -> bool:
        walked.append(asked)
        return True

    monkeypatch.setattr(backend, "can_launch", can)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), dtype=torch.float64), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert walked
    assert "backward" in emulated_gpu


@pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of programs")
def test_a_learning_on_the_gpu_is_the_references() -> None:
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), device="cuda"), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of programs")
@pytest.mark.parametrize(("sides", "update", "outer"), [*CASES, pytest.param((784, 128, 128, 10), sgd(), "path")])
def test_the_gpu_walks_as_the_reference(sides: tuple[int, ...], update: LocalOptimizer, outer: str | None) -> None:
    compared = Comparison(CudaTrainer, device=torch.device("cuda"), dtype=torch.float32)
    compared.check(sides, update, outer, 2e-6)


@pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of programs")
@pytest.mark.parametrize(
    ("sides", "outer"),
    [((64, 40, 24, 5), "path"), ((132, 20, 70, 16), "balanced"), ((784, 128, 128, 10), None)],
)
def test_pairs_of_the_gpu_walk_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[int, ...], outer: str | None
) -> None:
    monkeypatch.setattr(fused_walk, "multiprocessors", lambda device: 1)
    assert Shape(sides[0], sides[1:], BATCH).fits_pair(shared_memory(torch.device("cuda")))
    # Tensor cores cut off what a sum has no room for, where others round it: some ten times the error.
    compared = Comparison(CudaTrainer, device=torch.device("cuda"), dtype=torch.float32)
    compared.check(sides, sgd(), outer, 1e-5, gradients=False, back=False)


def test_what_is_left_to_the_reference_walk() -> None:
    x = torch.zeros(4, 20)
    assert not is_supported(stack((20, 5)), 2, x), "the data are on the CPU"
    shape = Shape(784, (128, 128, 10), 50)
    assert shape.fits(HOPPER)
    assert not shape.fits(99 * 1024), "a GPU with less shared memory"
    assert shape.fits_backward(HOPPER)
    assert not shape.fits_backward(shape.shared_bytes("backward") - 1)
    assert Shape(192, (120,), 100).fits_backward(HOPPER)
    assert shape.fits_pair(HOPPER)
    assert not shape.fits_pair(HOPPER - 1024 * 100), "a GPU with less shared memory"
    for less_plain in ({"prox": True}, {"sums": True}, {"features": 782}, {"rows": 65}, {"rows": 8}):
        assert not replace(shape, **less_plain).fits_pair(HOPPER)
    for outputs in ((128, 10), (129, 128, 10), (128, 129, 10), (128, 128, 17)):
        assert not replace(shape, outputs=outputs).fits_pair(HOPPER)
    assert not replace(shape, features=48).fits_pair(HOPPER), "some warps would have no features"
    assert not replace(shape, features=1024).fits_pair(HOPPER), "more than registers hold"
    assert not replace(Shape(192, (120,), 100), prox=True).fits_backward(HOPPER)
    assert not replace(shape, outputs=(128, 128, 128, 10)).fits(HOPPER), "too many layers"
    assert not replace(shape, features=3072, outputs=(512, 512, 10)).fits(HOPPER), "too large for shared memory"
    assert not Shape(64, (32, 10), jit.THREADS + 1).fits(HOPPER), "more rows than threads that read their labels"

"""The GPU's walk against the reference walk: its source on an emulated GPU in double precision, itself where there is
a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedunfold.environments import Environment
from fedunfold.environments.description import ModelSpec
from fedunfold.losses import OuterLoss
from fedunfold.rounds import Algorithm, run_together
from fedunfold.simulation import SimulatedFederation, engine
from fedunfold.simulation.fused import FusedWalk, can_walk, compiling
from fedunfold.simulation.fused import walk as fused_walk
from fedunfold.simulation.fused.compiling import HERE, Launch, Shape, shared_memory
from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.schedule import Draw, Schedule, Share, plan
from fedunfold.simulation.walk import OuterTerms, Tally, Walk
from fedunfold.unfolding.adjoint import unfold
from fedunfold.updates import LocalUpdate, nova, prox, sgd
from fedunfold.weighting.size import size

SHARES = [Share("a", 0, 40, 1), Share("b", 40, 13, 1), Share("c", 53, 30, 2)]
LANES, ROWS, BATCH = len(SHARES), 83, 18
CPU = torch.device("cpu")
WITH_GPU = torch.cuda.is_available() and shared_memory(torch.device("cuda")) > 0
HOPPER = 227 * 1024


def stack(sides: Sequence[int]) -> LinearStack:
    layers: list[nn.Module] = []
    for below, above in pairwise(sides):
        layers += [nn.Linear(below, above), nn.ReLU()]
    return LinearStack(nn.Sequential(*layers[:-1]))


def walks(
    sides: Sequence[int], update: LocalUpdate, outer: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[Walk, FusedWalk]:
    """The reference walk in float64 on the CPU, and the fused one."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, sides[0], generator=draw, dtype=torch.float64)
    y = torch.randint(0, sides[-1], (ROWS,), generator=draw)
    class_weights = torch.rand(sides[-1], generator=draw, dtype=torch.float64)
    minibatches = plan([(Draw(0, "run", 0), share) for share in SHARES], BATCH, BATCH)

    def parts(
        device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Schedule, Tensor, LocalUpdate, OuterTerms | None]:
        terms = None
        if outer is not None:
            loss = OuterLoss(outer)  # type: ignore[arg-type]
            weights = class_weights.to(device, dtype) if loss.balances_classes else None
            terms = OuterTerms(loss, torch.tensor([1.0, 0.5, 2.0], dtype=dtype, device=device), weights)
        rates = torch.tensor([0.1, 0.05, 0.2], dtype=dtype, device=device)
        return x.to(device, dtype), y.to(device), minibatches.on(device, dtype), rates, update, terms

    kernel = stack(sides)
    reference = Walk(kernel, *parts(CPU, torch.float64), 2**30)
    return reference, FusedWalk(kernel, *parts(device, dtype))


def tally(size: int, like: Tensor, *, gradients: bool) -> Tally:
    return Tally(like.new_empty(2, LANES), None, like.new_zeros(LANES, size) if gradients else None)


def compare(
    sides: Sequence[int],
    update: LocalUpdate,
    outer: str | None,
    tolerance: float,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Models, losses, sums of gradients, and for one layer the walk back."""
    reference, fused = walks(sides, update, outer, device, dtype)
    size = sum(shape.numel() for shape in reference.kernel.shapes)
    start = torch.randn(LANES, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 0.2
    along = outer is not None and not OuterLoss(outer).only_last_layer  # type: ignore[arg-type]
    wanted, seen = (tally(size, w.step_sizes, gradients=along) for w in (reference, fused))
    pairs = [(reference.forward(start, wanted), fused.forward(start.to(device, dtype), seen))]
    pairs += zip(wanted.losses, seen.losses, strict=True)
    if wanted.outer_gradients is not None and seen.outer_gradients is not None:
        pairs.append((wanted.outer_gradients, seen.outer_gradients))
    if fused.can_walk_back(2**30):
        adjoint = torch.randn(LANES, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        pairs.append(
            (reference.backward(start, adjoint), fused.backward(start.to(device, dtype), adjoint.to(device, dtype)))
        )
    for expected, found in pairs:
        assert float((expected - found.cpu().double()).norm()) <= tolerance * float(expected.norm())


CASES = [
    pytest.param((20, 5), sgd(), None, id="one layer"),
    pytest.param((37, 11), sgd(), "balanced", id="one layer, balanced"),
    pytest.param((21, 5), prox(0.3), "path", id="one layer, prox"),
    pytest.param((20, 5), sgd(), "final", id="one layer, final"),
    pytest.param((20, 33, 5), sgd(), "balanced", id="two layers, balanced"),
    pytest.param((30, 20, 40), prox(0.3), "path", id="two layers, prox, many classes"),
    pytest.param((70, 40, 24, 5), sgd(), "sample", id="three layers, sample"),
    pytest.param((25, 13, 17, 6), prox(0.3), "balanced", id="three layers, prox, balanced"),
]


class Emulated(Launch):
    """A launch that needs no device."""

    def __call__(self, lanes: int, arguments: Sequence[Any]) -> None:
        self.kernel((lanes,), (1,), list(arguments), 0)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let launches go to the kernels' source, compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated GPU with")
    threads = 64  # fewer to emulate, and more than one round of most loops
    for module in (compiling, fused_walk):
        monkeypatch.setattr(module, "WARPS", threads // 32)
    monkeypatch.setattr(compiling, "THREADS", threads)
    tests = Path(__file__).parent
    source = (HERE / "walk.cu").read_text()
    memory = "extern __shared__ __align__(16) char memory[];"
    assert memory in source
    source = source.replace(memory, "char* memory = own_memory();").replace("alignas(16)", "alignas(sizeof(Quad))")
    built = tmp_path / "walk.cpp"
    built.write_text(f'#include "{tests}/emulated_gpu.h"\n{source}\n#include "{tests}/emulated_launches.h"\n')

    def compiled(name: str, shape: Shape, device: torch.device) -> Launch:
        macros = [macro for macro in shape.macros(name) if "_BYTES" not in macro]
        library = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.so"  # one loaded already must not be written over
        options = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-shared", "-fPIC", *macros]
        subprocess.run([compiler, *options, "-o", str(library), str(built)], check=True)
        kernel = getattr(ctypes.CDLL(str(library)), f"emulated_{name}")

        def launch(_grid: object, _block: object, arguments: list[Any], _bytes: int) -> None:
            kernel(*(_argument(argument) for argument in arguments))

        return Emulated(launch, 0, device)

    monkeypatch.setattr(fused_walk, "compiled", compiled)
    monkeypatch.setattr(fused_walk, "shared_memory", lambda device: HOPPER)


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int(value)


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize(("sides", "update", "outer"), CASES)
def test_the_gpu_source_walks_as_the_reference(sides: tuple[int, ...], update: LocalUpdate, outer: str | None) -> None:
    compare(sides, update, outer, 1e-12)


def learned(federation: SimulatedFederation, trials: int) -> list[Tensor]:
    """Gradients of the weights, and the last model of several runs side by side."""
    theta, start = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double(), federation.initial_model("a")
    outers = (OuterLoss("path"), OuterLoss("balanced"))
    slopes = [
        unfold(federation, theta, Algorithm(nova()), outer, "first_order", run="a", model=start).gradient
        for outer in outers
    ]
    runs = run_together(federation, size(), 2, [f"trial-{trial}" for trial in range(trials)])
    return [*slopes, *(run.model.cpu().double() for run in runs)]


def unequal() -> Environment:
    """Clients of other sizes, so that lanes have another order than clients, and now and then absent; their rows lie
    column by column, as tables do."""
    draw = np.random.default_rng(0)
    sizes = (("a", 7), ("b", 23), ("c", 12))
    rows = {key: (np.asfortranarray(draw.random((n, 20))), draw.integers(0, 5, n)) for key, n in sizes}
    model = ModelSpec(hidden=(16,))
    test = (draw.random((9, 20)), np.arange(9) % 5)
    return Environment.from_arrays(rows, test, rounds=3, batch_size=4, lr=0.1, reliability=0.7, model=model)


@pytest.mark.usefixtures("emulated_gpu")
def test_a_learning_by_the_gpu_source_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine hands to a launch and makes of what comes back."""
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    walked: list[object] = []

    def can(*asked: object) -> bool:
        walked.append(asked)
        return True

    monkeypatch.setattr(engine, "can_walk", can)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), dtype=torch.float64), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert walked


@pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of programs")
def test_a_learning_on_the_gpu_is_the_references() -> None:
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), device="cuda"), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of programs")
@pytest.mark.parametrize(("sides", "update", "outer"), [*CASES, pytest.param((784, 128, 128, 10), sgd(), "path")])
def test_the_gpu_walks_as_the_reference(sides: tuple[int, ...], update: LocalUpdate, outer: str | None) -> None:
    compare(sides, update, outer, 2e-6, torch.device("cuda"), torch.float32)


def test_what_is_left_to_the_reference_walk() -> None:
    x = torch.zeros(4, 20)
    assert not can_walk(stack((20, 5)), 2, x, sgd(), None), "the data are on the CPU"
    shape = Shape(784, (128, 128, 10), 50)
    assert shape.fits(HOPPER)
    assert not shape.fits(99 * 1024), "a GPU with less shared memory"
    assert not shape.fits_backward(HOPPER), "the walk back is there for one layer"
    assert Shape(192, (120,), 100).fits_backward(HOPPER)
    assert not replace(Shape(192, (120,), 100), prox=True).fits_backward(HOPPER)
    assert not replace(shape, outputs=(128, 128, 128, 10)).fits(HOPPER), "too many layers"
    assert not replace(shape, features=3072, outputs=(512, 512, 10)).fits(HOPPER), "too large for shared memory"
    assert not Shape(64, (32, 10), compiling.THREADS + 1).fits(HOPPER), "more rows than threads that read their labels"

"""Local training on a GPU against the reference: the kernels' source on an emulated GPU in double precision, and the
kernels where there is a GPU."""

import ctypes
import importlib
import inspect
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.messages import TrainRequest
from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.backend import Backend
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, LocalTrainer, OuterWeights
from fedunfold.engines.simulation.backends.cuda import jit
from fedunfold.engines.simulation.backends.cuda.jit import HERE, SOURCES, KernelConfig, Launch, Name, shared_memory
from fedunfold.engines.simulation.backends.cuda.local_training import CudaTrainer, is_supported
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.local import sgd
from tests.support.comparing import BATCH, CASES, CPU, SLOTS, Comparison, learned, stack, unequal

WITH_GPU = torch.cuda.is_available() and shared_memory(torch.device("cuda")) > 0
needs_gpu = pytest.mark.skipif(not WITH_GPU, reason="needs a GPU with clusters of thread blocks")
HOPPER = 227 * 1024
SUPPORT = Path(__file__).parents[2] / "support"
MEMORY, OWN_MEMORY = "extern __shared__ __align__(16) char memory[];", "char* memory = own_memory();"


class Recurrent(nn.Module):
    """Reads the features of `unequal` one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(x.unsqueeze(-1))[1][0])
        return outputs


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Name]:
    """Let launches go to the kernels' source, compiled for the CPU. Gives the names of those that were launched."""
    launched: list[Name] = []
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated GPU with")
    monkeypatch.setattr(jit, "THREADS", 64)  # fewer to emulate, and more than one round of most loops

    @cache
    def built(name: Name, config: KernelConfig) -> Any:
        source = "".join((HERE / part).read_text() for part in SOURCES[name])
        assert MEMORY in source
        source = source.replace(MEMORY, OWN_MEMORY).replace("alignas(16)", "alignas(sizeof(Quad))")
        made = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"  # one loaded already must not be written over
        written, library = made.with_suffix(".cpp"), made.with_suffix(".so")
        written.write_text(f'#include "{SUPPORT}/emulated_gpu.h"\n{source}\n#include "{SUPPORT}/emulated_launches.h"\n')
        macros = [macro for macro in config.macros(name) if "_BYTES" not in macro]
        if name != "backward":
            macros.append(f"-DKERNEL={name}")
        options = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-shared", "-fPIC", *macros]
        subprocess.run([compiler, *options, "-o", str(library), str(written)], check=True)
        symbol = "emulated_backward" if name == "backward" else "emulated_forward"
        return getattr(ctypes.CDLL(str(library)), symbol)

    def compile_kernel(name: Name, config: KernelConfig, device: torch.device) -> Launch:
        kernel = built(name, config)
        launched.append(name)

        def launch(slots: int, arguments: Sequence[Any]) -> None:
            kernel(*(_argument(argument) for argument in arguments))

        return launch

    monkeypatch.setattr(jit, "compile_kernel", compile_kernel)
    monkeypatch.setattr(jit, "shared_memory", lambda device: HOPPER)
    monkeypatch.setattr(jit, "multiprocessors", lambda device: 132)
    return launched


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int(value)


def test_torch_still_compiles_and_launches_by_these_names() -> None:
    """`torch.cuda._compile_kernel` is private: where this fails, `jit.py` and the bound on torch need a look."""
    private: Any = torch.cuda._compile_kernel
    source, name, *others = inspect.signature(private).parameters
    assert (source, name) == ("kernel_source", "kernel_name")
    assert "nvcc_options" in others
    kernel: Any = importlib.import_module("torch.cuda._utils")._CudaKernel
    assert list(inspect.signature(kernel.__call__).parameters)[1:5] == ["grid", "block", "args", "shared_mem"]
    assert list(inspect.signature(kernel.set_shared_memory_config).parameters)[1:] == ["shared_mem_bytes"]


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_a_torch_that_cannot_compile_trains_by_itself(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("not here")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: jit.FIRST_WITH_CLUSTERS)
    with caplog.at_level("WARNING", logger="fedunfold"):
        assert jit.shared_memory.__wrapped__(torch.device("cuda")) == 0
    assert "torch cannot compile here: not here" in caplog.text


@pytest.mark.parametrize(("sides", "update", "outer"), CASES)
def test_the_gpu_source_trains_as_the_reference(
    emulated_gpu: list[Name], sides: tuple[int, ...], update: LocalOptimizer, outer: str | None
) -> None:
    Comparison(CudaTrainer).check(sides, update, outer, 1e-12)
    assert emulated_gpu == (["forward"] if update.fused_mu else ["forward", "forward", "backward"])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(
            (name, KernelConfig(*sizes))
            for name in get_args(Name)
            for sizes in [(784, (128, 128, 10), 50), (64, (40, 24, 5), 9)]
        ),
        *(
            (name, KernelConfig(*sizes))
            for name in ("forward", "backward")
            for sizes in [(192, (120,), 100), (33, (17, 5), 7)]
        ),
    ],
)
def test_shared_memory_is_what_the_source_takes(tmp_path: Path, name: Name, config: KernelConfig) -> None:
    """A source that needs another amount than is launched with does not compile."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels' source with")
    source = "".join((HERE / part).read_text() for part in SOURCES[name])
    file = tmp_path / "kernel.cpp"
    file.write_text(f'#include "{SUPPORT}/emulated_gpu.h"\n{source.replace(MEMORY, OWN_MEMORY)}')
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", "-DREAL=float", *config.macros(name), str(file)]
    subprocess.run(command, check=True)
    wrong = [f"-DSHARED_BYTES={config.shared_bytes(name) + 16}" if "_BYTES" in part else part for part in command]
    assert "static assertion failed" in subprocess.run(wrong, capture_output=True, text=True, check=False).stderr


@pytest.mark.usefixtures("emulated_gpu")
def test_what_is_saved_for_the_backward_pass_stays_within_the_budget() -> None:
    """Of every step of three slots 5 · 33 + 5 numbers of the layer above the first, padded to 172, and of 18 rows the
    first layer's 33 outputs, padded to 40."""
    trainer = CudaTrainer(*Comparison(CudaTrainer)._parts((20, 33, 5), sgd(), "path", CPU, torch.float64))
    saved = len(trainer.batches.active) * 3 * (172 + 18 * 40) * 8
    assert trainer.supports_backward(saved)
    assert not trainer.supports_backward(saved - 1)


@pytest.mark.parametrize(
    ("sides", "outer", "register_groups"),
    [
        pytest.param((64, 40, 24, 5), None, 0, id="in shared memory"),
        pytest.param((64, 40, 24, 5), "path", 0, id="path"),
        pytest.param((64, 40, 24, 5), "balanced", 0, id="balanced"),
        pytest.param((132, 20, 70, 16), "final", 1, id="some in registers, padded"),
        pytest.param((208, 128, 128, 10), None, 2, id="the largest layers"),
    ],
)
def test_the_tensor_core_source_trains_as_the_reference(
    emulated_gpu: list[Name],
    monkeypatch: pytest.MonkeyPatch,
    sides: tuple[int, ...],
    outer: str | None,
    register_groups: int,
) -> None:
    config = KernelConfig(sides[0], sides[1:], BATCH)
    monkeypatch.setattr(jit, "MAX_SHARED_BYTES", config._tensor_core_bytes(register_groups))
    monkeypatch.setattr(jit, "multiprocessors", lambda device: SLOTS * jit.CLUSTER_BLOCKS - 1)
    assert config.register_groups == register_groups
    Comparison(CudaTrainer).check(sides, sgd(), outer, 1e-12, gradients=False, backward=False)
    assert emulated_gpu == ["forward_tensor_cores"]


def test_a_slot_that_diverges_on_tensor_cores_does_so_alone_and_says_so(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "multiprocessors", lambda device: 1)
    Comparison(CudaTrainer).check((64, 40, 24, 5), sgd(), None, 1e-12, backward=False, spoilt=True)
    assert emulated_gpu == ["forward_tensor_cores"]


@pytest.mark.usefixtures("emulated_gpu")
def test_more_rows_than_tensor_cores_can_count_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "multiprocessors", lambda device: 1)
    parts = Comparison(CudaTrainer)._parts((64, 40, 24, 5), sgd(), None, CPU, torch.float64)
    trainer, config = CudaTrainer(*parts), KernelConfig(64, (40, 24, 5), BATCH)
    assert trainer._uses_tensor_cores(config, SLOTS)
    assert not replace(trainer, x=torch.empty(2**26, 64, device="meta"))._uses_tensor_cores(config, SLOTS)


def test_tensor_cores_train_only_where_slots_have_no_room_for_more_blocks(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "multiprocessors", lambda device: SLOTS * jit.CLUSTER_BLOCKS)
    Comparison(CudaTrainer).check((64, 40, 24, 5), sgd(), None, 1e-12, backward=False)
    assert emulated_gpu == ["forward"]


def test_a_weight_learning_run_by_the_gpu_source_is_the_references(
    emulated_gpu: list[Name], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine passes to a launch and makes of its results."""
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)

    def launch(
        self: Backend,
        batches: DeviceBatchPlan,
        step_sizes: Tensor,
        outer: OuterWeights | None,
        request: TrainRequest,
        **_: bool,
    ) -> LocalTrainer:
        assert isinstance(self.kernel, MLPKernel)
        assert self.in_memory is not None
        parts = batches, step_sizes, request.optimizer, outer
        return CudaTrainer(self.kernel, self.samples.y, *parts, self.in_memory)

    monkeypatch.setattr(Backend, "select_trainer", launch)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), dtype=torch.float64), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert {"forward", "backward"} == set(emulated_gpu)


@pytest.mark.gpu
@needs_gpu
def test_a_weight_learning_run_on_the_gpu_is_the_references() -> None:
    reference = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    for expected, found in zip(reference, learned(SimulatedFederation(unequal(), device="cuda"), 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("sides", "update", "outer"), [*CASES, pytest.param((784, 128, 128, 10), sgd(), "path")])
def test_the_gpu_trains_as_the_reference(sides: tuple[int, ...], update: LocalOptimizer, outer: str | None) -> None:
    compared = Comparison(CudaTrainer, device=torch.device("cuda"), dtype=torch.float32)
    compared.check(sides, update, outer, 2e-6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("sides", "outer"),
    [((64, 40, 24, 5), "path"), ((132, 20, 70, 16), "balanced"), ((784, 128, 128, 10), None)],
)
def test_tensor_cores_train_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[int, ...], outer: str | None
) -> None:
    monkeypatch.setattr(jit, "multiprocessors", lambda device: 1)
    assert KernelConfig(sides[0], sides[1:], BATCH).fits_tensor_cores(shared_memory(torch.device("cuda")))
    # Tensor cores cut off what a sum has no room for, where others round it: some ten times the error.
    compared = Comparison(CudaTrainer, device=torch.device("cuda"), dtype=torch.float32)
    compared.check(sides, sgd(), outer, 1e-5, gradients=False, backward=False)


@pytest.mark.gpu
@needs_gpu
def test_recurrent_layers_are_learned_through_on_the_gpu() -> None:
    reference = learned(SimulatedFederation(unequal(), model=Recurrent, dtype=torch.float64), 2)
    on_gpu = learned(SimulatedFederation(unequal(), model=Recurrent, device="cuda"), 2)
    for expected, found in zip(reference, on_gpu, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_what_is_left_to_torch() -> None:
    x = torch.zeros(4, 20)
    assert not is_supported(stack((20, 5)), 2, x), "the data are on the CPU"
    config = KernelConfig(784, (128, 128, 10), 50)
    assert config.fits(HOPPER)
    assert not config.fits(99 * 1024), "a GPU with less shared memory"
    assert config.fits_backward(HOPPER)
    assert not config.fits_backward(config.shared_bytes("backward") - 1)
    assert KernelConfig(192, (120,), 100).fits_backward(HOPPER)
    assert config.fits_tensor_cores(HOPPER)
    assert not config.fits_tensor_cores(HOPPER - 1024 * 100), "a GPU with less shared memory"
    for less_plain in ({"prox": True}, {"sums_gradients": True}, {"features": 782}, {"rows": 65}, {"rows": 8}):
        assert not replace(config, **less_plain).fits_tensor_cores(HOPPER)
    for outputs in ((128, 10), (129, 128, 10), (128, 129, 10), (128, 128, 17)):
        assert not replace(config, outputs=outputs).fits_tensor_cores(HOPPER)
    assert not replace(config, features=48).fits_tensor_cores(HOPPER), "some warps would have no features"
    assert not replace(config, features=1024).fits_tensor_cores(HOPPER), "more than registers hold"
    assert not replace(KernelConfig(192, (120,), 100), prox=True).fits_backward(HOPPER)
    assert not replace(config, outputs=(128, 128, 128, 10)).fits(HOPPER), "too many layers"
    assert not replace(config, features=3072, outputs=(512, 512, 10)).fits(HOPPER), "too large for shared memory"
    assert not KernelConfig(64, (32, 10), jit.THREADS + 1).fits(HOPPER), "more rows than threads that read their labels"

"""Local training by compiled code against the reference by torch, and what is left to torch."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import ModelSpec
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.messages import Broadcast, TrainRequest
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.engines.simulation import SimulatedFederation, backend
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, OuterWeights
from fedunfold.engines.simulation.backends.cpu import bindings, is_built, permutations
from fedunfold.engines.simulation.backends.cpu import local_training as cpu_training
from fedunfold.engines.simulation.backends.cpu.local_training import CpuTrainer, SparseRows, is_supported
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.local import momentum, prox, sgd
from fedunfold.rules.size import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import unroll_and_grad
from tests.support.comparing import (
    CASES,
    CPU,
    Comparison,
    learned,
    normal_rows,
    scaled_rows,
    sparse_rows,
    stack,
    unequal,
)
from tests.support.federations import simulated, tiny

pytestmark = pytest.mark.skipif(not is_built(), reason="the extension was not built, or is for other processors")


def compiled_trainer(
    kernel: MLPKernel,
    y: Tensor,
    batches: DeviceBatchPlan,
    step_sizes: Tensor,
    optimizer: LocalOptimizer,
    outer: OuterWeights | None,
    x: Tensor,
) -> CpuTrainer:
    return CpuTrainer(kernel, y, batches, step_sizes, optimizer, outer, SparseRows.from_dense(x), threads=2)


MORE = [
    pytest.param((130, 40, 9, 33, 4), prox(0.3), "path", id="four layers"),
    pytest.param((784, 128, 128, 10), sgd(), "path", id="the paper's"),
]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [normal_rows, sparse_rows, scaled_rows])
@pytest.mark.parametrize(("sides", "update", "outer"), [*CASES, *MORE])
def test_it_trains_as_the_reference(
    rows: Callable[[int], Tensor], sides: tuple[int, ...], update: LocalOptimizer, outer: str | None
) -> None:
    Comparison(compiled_trainer, rows).check(sides, update, outer, 1e-11)
    Comparison(compiled_trainer, rows, dtype=torch.float32).check(sides, update, outer, 2e-5)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how many there are, for whatever small work."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_training, "WORTH_THREADS", 0)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 3, 50])
def test_threads_change_no_bit(threads: Callable[[int], None], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    called = bindings.call

    def call(name: Any, dtype: torch.dtype, args: bindings.CallArgs, *, is_long: bool) -> None:
        taken.append(args.threads)
        called(name, dtype, args, is_long=is_long)

    monkeypatch.setattr(cpu_training, "call", call)
    threads(1)
    by_one = learned(SimulatedFederation(unequal()), 2)
    threads(count)
    by_many = learned(SimulatedFederation(unequal()), 2)
    assert all(torch.equal(one, many) for one, many in zip(by_one, by_many, strict=True))
    assert set(taken) == {1, count}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the processor has no AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [(), (40, 9, 33)])
@pytest.mark.parametrize("batch_size", [1, 5, 8, 50])
@pytest.mark.parametrize("kept", [0.1, 1.0])
def test_both_kinds_of_processor_compute_the_same_bits(
    dtype: torch.dtype, hidden: tuple[int, ...], batch_size: int, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and the gradient of the weights, with what is skipped of sparse rows and without."""
    model = ModelSpec(hidden=hidden)
    env = tiny({"a": 150, "b": 65, "c": 3}, shape=(130,), batch_size=batch_size, model=model, lr=0.02)
    data = env.load()
    x = data.x * (torch.rand(data.x.shape, generator=torch.Generator().manual_seed(7)) < kept)
    found = []
    for name in bindings.TARGETS:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        found.append(learned(SimulatedFederation(env, replace(data, inputs=x), dtype=dtype), 2))
    assert all(torch.equal(narrow, wide) for narrow, wide in zip(*found, strict=True))


@pytest.mark.parametrize("batch_size", [1, 63, 64, 65, 130])
def test_minibatches_of_many_sparse_rows(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows have something in a column is noted for 64 rows and 64 columns at a time."""
    env = tiny({"a": 150, "b": 65, "c": 3}, shape=(130,), batch_size=batch_size, participation_probability=1.0)
    data = env.load()
    x = data.x * (torch.rand(data.x.shape, generator=torch.Generator().manual_seed(7)) < 0.1)
    updates = []
    for compiled in (True, False):
        monkeypatch.setattr(backend, "is_cpu_supported", lambda x, answer=compiled: answer)
        federation = SimulatedFederation(env, replace(data, inputs=x), dtype=torch.float64)
        assert (federation._backend.cpu is not None) == compiled
        request = TrainRequest("a", 0, federation.initial_model("a"), sgd())
        updates.append(federation.train([request])[0].updates.rows)
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lr", [1e3, 1e12, 1e30])
def test_who_diverges_is_found_as_by_torch(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client a has rows so large that only it diverges with the smaller rates."""
    env = tiny(lr=lr)
    data = env.load()
    x = data.x.clone() * 1e-4
    x[: data.sizes[0]] *= 1e30
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(backend, "is_cpu_supported", lambda x, answer=compiled: answer)
        federation = SimulatedFederation(env, replace(data, inputs=x))
        request = TrainRequest("a", 0, federation.initial_model("a"), sgd(), frozenset({"loss"}))
        try:
            found.append(set(federation.train([request])[0].rejected))
        except DivergenceError:
            found.append({"everybody"})
    assert found[0] == found[1]
    assert found[0], "nobody diverged"


def test_a_small_loss_beside_large_logits_keeps_its_digits() -> None:
    """One row, whose logits are 1000, 1000 − 8 and less: log(1 + e⁻⁸ + …)."""
    x, y = np.full((1, 1), 1.0, np.float32), np.zeros(1, int)
    env = Environment.from_arrays({"a": (x, y)}, (x, y), rounds=1, batch_size=1, lr=1e-9, classes=3, model=())
    federation = SimulatedFederation(env)
    model = torch.tensor([1000.0, 992.0, 900.0, 0.0, 0.0, 0.0])
    (report,) = federation.train([TrainRequest("a", 0, model, sgd(), frozenset({"loss"}))])
    assert float(report.metric("loss")[0]) == pytest.approx(np.log1p(np.exp(-8)), rel=1e-4)


@pytest.mark.parametrize("outer", ["path", "balanced", "final"])
@pytest.mark.parametrize("rows", [normal_rows, scaled_rows])
@pytest.mark.parametrize("absent", [0.0, 0.5])
def test_absent_clients_and_the_final_loss_are_evaluated_as_by_torch(
    outer: str, rows: Callable[[int], Tensor], absent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = tiny({"a": 70, "b": 1, "c": 2}, shape=(20,), batch_size=4, participation_probability=1 - absent)
    data = replace(env.load(), inputs=rows(20))
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(backend, "is_cpu_supported", lambda x, answer=compiled: answer)
        federation = SimulatedFederation(env, data, dtype=torch.float64)
        start = federation.initial_model("a")
        request = TrainRequest("a", 0, start, sgd(), outer=OUTER_LOSSES.make(outer), path_gradient=True)
        (last,), (report,) = federation.outer_loss([request]), federation.train([request])
        gradient = report.outer.gradient
        numbers = torch.tensor([last.loss, report.outer.loss], dtype=torch.float64)
        found.append([numbers, last.gradient, start * 0 if gradient is None else gradient])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)


def test_an_outlier_of_one_client_is_not_the_background_of_all() -> None:
    draw = np.random.default_rng(0)
    x = np.where(draw.random((60, 8)) < 0.2, draw.random((60, 8)), 0)
    x[-1, 3] = -1e6
    rows = SparseRows.from_dense(torch.tensor(x))
    assert rows.nonzero is not None
    assert rows.background is None, "zeros are, also in the column with the outlier"


def test_a_long_round_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while compiled code, here a stand-in for it, waits to be stopped."""
    waited: list[bool] = []

    def train(args: Any) -> int:
        stopped = ctypes.c_int64.from_address(args._obj.stopped)
        os.kill(os.getpid(), signal.SIGALRM)
        while not stopped.value:
            time.sleep(0.001)
        waited.append(True)
        return 0

    monkeypatch.setattr(bindings, "_library", lambda: SimpleNamespace(**dict.fromkeys(bindings.TRAINING, train)))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bindings.call("forward", torch.float32, bindings.CallArgs(), is_long=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert waited


@pytest.mark.parametrize("name", get_args(bindings.Name))
def test_an_interrupted_round_takes_no_step(name: str) -> None:
    trainer = compiled_trainer(*Comparison(compiled_trainer)._parts((20, 5), sgd(), "path", CPU, torch.float64))
    start = torch.randn(3, 105, generator=torch.Generator().manual_seed(0)).double()
    left, stopped, losses = start.clone(), ctypes.c_int64(1), torch.zeros(2, 3).double()
    sums = torch.zeros_like(start)
    args = trainer._args(start, left)
    predicted, row_losses = torch.zeros(4, 3, 18).long() - 1, torch.zeros(4, 3, 18).double() - 1
    args.stopped, args.losses, args.sums = ctypes.addressof(stopped), losses.data_ptr(), sums.data_ptr()
    args.predicted, args.row_losses = predicted.data_ptr(), row_losses.data_ptr()
    target = bindings.TARGETS[torch.backends.cpu.get_cpu_capability()]
    getattr(bindings._library(), f"{name}_double_{target}")(ctypes.byref(args))
    assert torch.equal(left, start)
    assert not losses.any()
    assert not sums.any()
    assert (predicted == -1).all()
    assert (row_losses == -1).all()


def test_a_weight_learning_run_by_it_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    monkeypatch.setattr(backend, "is_cpu_supported", lambda x: False)
    for expected, ours in zip(learned(SimulatedFederation(unequal(), dtype=torch.float64), 3), found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)


def chosen(federation: SimulatedFederation, monkeypatch: pytest.MonkeyPatch, update: LocalOptimizer) -> set[str]:
    """The trainers that a run takes."""
    taken = set()
    select = backend.Backend.select_trainer

    def note(*args: Any, **kwargs: Any) -> Any:
        trainer = select(*args, **kwargs)
        taken.add(type(trainer).__name__)
        return trainer

    monkeypatch.setattr(backend.Backend, "select_trainer", note)
    run_rounds(federation, size(), 1, algorithm=Algorithm(update))
    return taken


@pytest.mark.parametrize(
    ("update", "dtype", "biased", "expected"),
    [
        (sgd(), torch.float32, True, CpuTrainer),
        (prox(0.1), torch.float64, True, CpuTrainer),
        (momentum(0.9), torch.float32, True, TorchTrainer),
        (sgd(), torch.float32, False, TorchTrainer),
    ],
)
def test_what_it_trains(
    update: LocalOptimizer, dtype: torch.dtype, biased: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = simulated(tiny(), lambda: nn.Sequential(nn.Linear(5, 3, bias=biased)), dtype=dtype)
    assert chosen(federation, monkeypatch, update) == {expected.__name__}


def test_what_is_left_to_torch() -> None:
    path, mse = (OuterWeights(OUTER_LOSSES.make(name), torch.ones(1), None) for name in ("path", "mse"))
    assert backend._is_fused(stack((20, 5)), sgd(), path)
    assert not backend._is_fused(stack((20, 5)), sgd(), mse), "an outer loss of another kind"
    assert not is_supported(torch.zeros(2, 3, dtype=torch.bfloat16))


@pytest.fixture
def unknown_library() -> Iterator[None]:
    bindings._library.cache_clear()
    yield
    bindings._library.cache_clear()


@pytest.mark.usefixtures("unknown_library")
def test_a_processor_without_its_vectors_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not is_supported(torch.zeros(2, 3))


@pytest.mark.usefixtures("unknown_library")
@pytest.mark.parametrize(
    ("more_bytes", "said"),
    [(None, "cannot be loaded"), (7, "another version's; install fedunfold again"), (0, "another version's")],
)
def test_a_library_that_does_not_fit_is_left_to_torch(
    more_bytes: int | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(path: str) -> Any:
        if more_bytes is None:
            raise OSError("not a library")
        return SimpleNamespace(call_args_bytes=lambda: ctypes.sizeof(bindings.CallArgs) + more_bytes)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with caplog.at_level("WARNING", logger="fedunfold"):
        assert not is_supported(torch.zeros(2, 3))
    assert said in caplog.text


@pytest.mark.usefixtures("unknown_library")
@pytest.mark.parametrize(
    ("name", "said"), [("forward_float", "memory for a round"), ("shuffle_rows", "memory for the minibatches")]
)
def test_too_little_memory_is_an_error(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where drawing is checked against numpy, as it is before the first round."""
    failed = {full: lambda *given: 1 for full in bindings.FUNCTIONS if full.startswith(name)}
    failing = SimpleNamespace(**dict.fromkeys(bindings.FUNCTIONS, lambda *given: 0) | failed)
    failing.call_args_bytes = lambda: ctypes.sizeof(bindings.CallArgs)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: failing)
    permutations._draws_as_numpy.cache_clear()
    try:
        with pytest.raises(MemoryError, match=said):
            learned(SimulatedFederation(unequal()), 1)
    finally:
        permutations._draws_as_numpy.cache_clear()


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(10_000)])
def test_models_of_another_length_are_refused(wrong: Tensor) -> None:
    federation = simulated(tiny())
    request = TrainRequest("a", 0, federation.initial_model("a"), sgd())
    with pytest.raises(InputError, match=f"the model has {len(wrong)} entries"):
        federation.train([replace(request, model=wrong)])
    with pytest.raises(InputError, match="the adjoint has"):
        federation.vjp([request], [torch.ones(3, dtype=torch.bool)], [wrong.expand(3, -1)])
    few = replace(request, outer=OUTER_LOSSES.make("balanced"), broadcast=Broadcast(class_weights=torch.ones(2)))
    with pytest.raises(InputError, match="2 class weights for 3 classes"):
        federation.train([few])


def test_a_model_that_is_not_contiguous_is_read() -> None:
    federation = simulated(tiny())
    start = federation.initial_model("a")
    across = torch.stack([start, start * 0], 1)[:, 0]
    assert not across.is_contiguous()
    found, wanted = federation.train([TrainRequest("a", 0, model, sgd()) for model in (across, start)])
    assert torch.equal(found.updates.rows, wanted.updates.rows)


def test_what_the_backward_pass_saves() -> None:
    """Three slots of 4 steps of 18 rows: of each step 18 rows of 16 and 16 units and the second layer (6 · 16), of each
    slot twice a model of (21 + 6) · 16."""
    numbers = 3 * (4 * (18 * 32 + 6 * 16) + 2 * (21 + 6) * 16)
    trainer = compiled_trainer(*Comparison(compiled_trainer)._parts((20, 5, 4), sgd(), "path", CPU, torch.float64))
    assert trainer.batches.rows.shape == (4, 3, 18)
    assert trainer.supports_backward(8 * numbers)
    assert not trainer.supports_backward(8 * numbers - 1)


def test_the_backward_pass_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(budget: int | None) -> Tensor:
        federation = SimulatedFederation(tiny(), dtype=torch.float64, memory_budget=budget)
        theta, start = torch.full((3, 3), 0.6).double(), federation.initial_model("a")
        parts = (federation, theta, Algorithm(), OUTER_LOSSES.make("path"))
        return unroll_and_grad(*parts, "exact", runs=["a"], models=[start])[0].gradient

    wanted = gradient(None)
    with pytest.raises(AssertionError), monkeypatch.context() as patched:
        patched.setattr(CpuTrainer, "backward", _not_called)
        gradient(None)
    monkeypatch.setattr(CpuTrainer, "backward", _not_called)
    torch.testing.assert_close(gradient(1), wanted, rtol=1e-10, atol=1e-14)


def _not_called(*_: object) -> Tensor:
    raise AssertionError


@given(
    st.integers(1, 12).flatmap(
        lambda features: st.lists(
            st.lists(st.sampled_from([-1.0, 0.0, 0.0, 0.0, 2.5]), min_size=features, max_size=features),
            min_size=1,
            max_size=9,
        )
    )
)
def test_rows_and_their_background_are_the_data(values: list[list[float]]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    rows = SparseRows.from_dense(x)
    background = torch.zeros(x.shape[1]).double() if rows.background is None else rows.background
    torch.testing.assert_close(rows.values + background, x)
    if rows.nonzero is not None:
        bits = np.unpackbits(rows.nonzero, axis=1, bitorder="little")
        assert bits.shape[1] % 64 == 0
        np.testing.assert_array_equal(bits[:, : x.shape[1]], (rows.values != 0).numpy())
        assert not bits[:, x.shape[1] :].any()
    if rows.overlaps is not None:
        torch.testing.assert_close(rows.overlaps, rows.values @ background)


def test_numbers_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        Comparison(lambda kernel, y, *parts: compiled_trainer(kernel, y.int(), *parts)).check(
            (20, 5), sgd(), None, 1e-12
        )

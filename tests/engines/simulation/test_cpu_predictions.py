"""Predictions by compiled code against those of torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedunfold.core.errors import InputError
from fedunfold.core.messages import Metric, TrainRequest
from fedunfold.engines.simulation import SimulatedFederation, backend, evaluation
from fedunfold.engines.simulation.backend import Backend
from fedunfold.engines.simulation.backends.cpu import bindings, is_built
from fedunfold.engines.simulation.backends.cpu import local_training as cpu_training
from fedunfold.engines.simulation.batching import MemorySamples
from fedunfold.engines.simulation.evaluation import Evaluator
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.local import sgd
from tests.support.comparing import normal_rows, scaled_rows, sparse_rows, stack
from tests.support.federations import simulated, tiny

pytestmark = pytest.mark.skipif(not is_built(), reason="the extension was not built, or is for other processors")

STACKS = [(20, 5), (37, 11), (20, 33, 5), (70, 40, 24, 5), (130, 40, 9, 33, 4), (784, 128, 128, 10)]


def samples(sides: Sequence[int], x: Tensor, threads: int = 2) -> Backend:
    y = torch.randint(0, sides[-1], (len(x),), generator=torch.Generator().manual_seed(4))
    return Backend(stack(sides), MemorySamples(x, y), x.device, x.dtype, threads, memory_budget=2**30)


def rows_of(read: Backend) -> Tensor:
    assert read.in_memory is not None
    return read.in_memory


def model_for(read: Backend, spread: float = 0.2) -> Tensor:
    size = read.kernel.layout.num_params
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * spread


def check(read: Backend, model: Tensor, places: np.ndarray | None = None, tolerance: float = 1e-11) -> None:
    """Against torch in float64."""
    some = slice(None) if places is None else torch.from_numpy(places).long()
    chosen = MemorySamples(rows_of(read)[some].double(), read.samples.y[some])
    (wanted,), (losses,) = evaluation.predictions(read.kernel, model[None], chosen)
    predicted, found = Evaluator(read).predictions(model.to(read.dtype), places)
    assert found.dtype == read.dtype
    assert torch.equal(predicted, wanted)
    torch.testing.assert_close(found.double(), losses, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [normal_rows, sparse_rows, scaled_rows])
@pytest.mark.parametrize("sides", STACKS)
def test_they_are_those_of_torch(
    rows: Callable[[int], Tensor], sides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_training, "WORTH_THREADS", 0)
    read = samples(sides, rows(sides[0]))
    for places in (None, np.array([2, 3, 5, 7, 70], dtype=np.int32), np.arange(9, 40, dtype=np.int32)):
        check(read, model_for(read), places)
        single = replace(read, samples=MemorySamples(rows_of(read).float(), read.samples.y), dtype=torch.float32)
        check(single, model_for(read), places, tolerance=2e-5)


@given(
    sides=st.lists(st.integers(2, 40), min_size=2, max_size=5),
    count=st.integers(1, 700),
    some=st.floats(0, 1),
    background=st.sampled_from([None, 0.0, -1.5]),
)
def test_they_are_those_of_torch_for_any_shape(
    sides: list[int], count: int, some: float, background: float | None
) -> None:
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, sides[0], generator=draw).double()
    if background is not None:
        x = torch.where(torch.rand(x.shape, generator=draw) < 0.2, x.abs(), background)
    read = samples(sides, x)
    check(read, model_for(read), np.arange(count, dtype=np.int32)[: max(1, round(some * count))])


@pytest.mark.parametrize("count", [2, 3, 50])
def test_threads_change_no_bit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    called = bindings.call

    def call(name: bindings.Name, dtype: torch.dtype, args: bindings.CallArgs, *, is_long: bool) -> None:
        taken.append(args.threads)
        called(name, dtype, args, is_long=is_long)

    monkeypatch.setattr(cpu_training, "call", call)
    monkeypatch.setattr(cpu_training, "WORTH_THREADS", 0)
    x = scaled_rows(70).float().repeat(14, 1)[:1003]
    read = samples((70, 33, 5), x, threads=1)
    model = model_for(read).float()
    by_one, by_many = (Evaluator(replace(read, threads=n)).predictions(model) for n in (1, count))
    assert all(torch.equal(one, many) for one, many in zip(by_one, by_many, strict=True))
    assert taken == [1, count]


def test_of_classes_that_are_alike_the_first_is_predicted() -> None:
    read = samples((20, 40), normal_rows(20))
    model = torch.zeros(21 * 40).double()
    predicted, losses = Evaluator(read).predictions(model)
    assert not predicted.any()
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(40)))
    model[20 * 40 + torch.tensor([9, 3, 39])] = 1
    assert (Evaluator(read).predictions(model)[0] == 3).all()


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_has_no_finite_loss(weight: float) -> None:
    """Column 3 is 0 in all rows: compiled code skips its weights."""
    read = samples((20, 5), sparse_rows(20))
    model = model_for(read)
    model[3] = weight
    assert not rows_of(read)[:, 3].any()
    assert Evaluator(read).predictions(model)[1].isnan().all()


def test_logits_that_overflow_have_no_finite_loss() -> None:
    """Weights of 1e38 are finite, and sums of them are not; the predicted class is undefined."""
    read = samples((20, 33, 5), normal_rows(20).float())
    model = model_for(read).sign().float() * 1e38
    _, losses = Evaluator(read).predictions(model)
    assert not losses.isfinite().any()
    assert not evaluation.predictions(read.kernel, model[None], read.samples)[1].isfinite().any()


@pytest.mark.parametrize("length", [0, 104, 106, 10_000])
def test_models_of_another_length_are_refused(length: int) -> None:
    read = samples((20, 5), normal_rows(20))
    with pytest.raises(ValueError, match="models of 105 numbers"):
        Evaluator(read).predictions(torch.zeros(length).double())
    federation = simulated(tiny())
    with pytest.raises(InputError, match=f"the model has {length} entries"):
        federation.evaluate([torch.zeros(length).double()])
    with pytest.raises(InputError, match=f"the model has {length} entries"):
        federation.client_accuracies(torch.zeros(length).double())


@pytest.mark.parametrize("label", [-1, 5])
def test_labels_that_are_no_classes_are_refused(label: int) -> None:
    read = samples((20, 5), normal_rows(20))
    read.samples.y[6] = label
    with pytest.raises(ValueError, match="labels other than 0 to 4"):
        Evaluator(read).predictions(model_for(read))


def test_a_model_that_is_not_contiguous_is_read() -> None:
    read = samples((20, 5), normal_rows(20))
    model = model_for(read)
    across = torch.stack([model, model * 0], 1)[:, 0]
    assert not across.is_contiguous()
    assert torch.equal(Evaluator(read).predictions(across)[1], Evaluator(read).predictions(model)[1])


def test_a_federation_finds_what_it_finds_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test, accuracies at the clients, and the losses of participating and absent clients."""
    env = tiny({"a": 70, "b": 1, "c": 2}, shape=(20,), batch_size=4, participation_probability=0.5)
    # A test set whose rows are stored column by column, as tables are.
    data = replace(env.load(), inputs=scaled_rows(20), test_inputs=normal_rows(20)[:6].T.contiguous().T)
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(backend, "is_cpu_supported", lambda x, answer=compiled: answer)
        federation = SimulatedFederation(env, data, dtype=torch.float64)
        start = federation.initial_model("a")
        metrics: frozenset[Metric] = frozenset({"loss", "start_loss", "accuracy"})
        (report,) = federation.train([TrainRequest("a", 0, start, sgd(), metrics, absent_loss="evaluate")])
        assert 0 < int(report.participated.sum()) < 3
        (tested,) = federation.evaluate([start])
        found.append(
            [
                torch.tensor([tested.score, tested.loss]).double(),
                tested.class_accuracy,
                federation.client_accuracies(start),
                *(report.metric(name) for name in ("loss", "start_loss", "accuracy")),
            ]
        )
    assert len(found[0]) == 6
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("biased", [True, False])
def test_torch_tests_only_what_compiled_code_does_not_know(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read, statistics = list[object](), evaluation.statistics

    def note(kernel: Kernel, model: Tensor, *rows: Any) -> tuple[Tensor, Tensor]:
        read.append(model)
        return statistics(kernel, model, *rows)

    monkeypatch.setattr(evaluation, "statistics", note)
    federation = simulated(tiny(), lambda: nn.Sequential(nn.Linear(5, 3, bias=biased)))
    federation.evaluate([federation.initial_model("a")])
    assert bool(read) != biased

"""The compiled walk against the reference walk, and what it is not asked for."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedunfold.losses import OuterLoss
from fedunfold.rounds import Algorithm, run_rounds
from fedunfold.simulation import SimulatedFederation, walks
from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.native import NativeWalk, Rows, can_walk, is_built, library
from fedunfold.simulation.schedule import Schedule
from fedunfold.simulation.walk import OuterTerms, Walk
from fedunfold.unfolding.adjoint import unfold
from fedunfold.updates import LocalUpdate, momentum, prox, sgd
from fedunfold.weighting.size import size
from tests.federations import simulated, tiny
from tests.simulation.comparing import CASES, Comparison, learned, normal_rows, stack, unequal

pytestmark = pytest.mark.skipif(not is_built(), reason="the compiled walk was not built, or is for other processors")


def sparse_rows(features: int) -> Tensor:
    """Rows of zeros but for some numbers, with empty rows and columns among them."""
    x = normal_rows(features).abs()
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.2] = 0
    x[7], x[:, 3] = 0, 0
    return x


def scaled_rows(features: int) -> Tensor:
    """The same, where every column was moved and stretched: the background is no longer 0."""
    draw = torch.Generator().manual_seed(6)
    return sparse_rows(features) * torch.rand(features, generator=draw) - torch.randn(features, generator=draw).double()


def native(
    kernel: LinearStack,
    x: Tensor,
    y: Tensor,
    schedule: Schedule,
    step_sizes: Tensor,
    update: LocalUpdate,
    outer: OuterTerms | None,
) -> NativeWalk:
    return NativeWalk(kernel, Rows.of(x), y, schedule, step_sizes, update, outer, threads=2)


MORE = [
    pytest.param((130, 40, 9, 33, 4), prox(0.3), "path", id="four layers"),
    pytest.param((784, 128, 128, 10), sgd(), "path", id="the paper's"),
]


@pytest.mark.parametrize("rows", [normal_rows, sparse_rows, scaled_rows])
@pytest.mark.parametrize(("sides", "update", "outer"), [*CASES, *MORE])
def test_it_walks_as_the_reference(
    rows: Callable[[int], Tensor], sides: tuple[int, ...], update: LocalUpdate, outer: str | None
) -> None:
    Comparison(native, rows).check(sides, update, outer, 1e-11)
    Comparison(native, rows, dtype=torch.float32).check(sides, update, outer, 2e-5)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_change_no_bit(two_threads: None) -> None:
    def walked() -> list[Tensor]:
        return learned(SimulatedFederation(unequal()), 2)

    with_two = walked()
    torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(walked(), with_two, strict=True))


def test_a_learning_by_it_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learned(SimulatedFederation(unequal(), dtype=torch.float64), 3)
    monkeypatch.setattr(walks, "can_call", lambda x: False)
    for expected, ours in zip(learned(SimulatedFederation(unequal(), dtype=torch.float64), 3), found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)


def chosen(federation: SimulatedFederation, monkeypatch: pytest.MonkeyPatch, update: LocalUpdate) -> set[str]:
    """The walks that a run takes."""
    taken = set()
    choose = walks.Walks.choose

    def note(*args: Any, **kwargs: Any) -> Any:
        walk = choose(*args, **kwargs)
        taken.add(type(walk).__name__)
        return walk

    monkeypatch.setattr(walks.Walks, "choose", note)
    run_rounds(federation, size(), 1, algorithm=Algorithm(update))
    return taken


@pytest.mark.parametrize(
    ("update", "dtype", "biased", "expected"),
    [
        (sgd(), torch.float32, True, NativeWalk),
        (prox(0.1), torch.float64, True, NativeWalk),
        (momentum(0.9), torch.float32, True, Walk),
        (sgd(), torch.float32, False, Walk),
    ],
)
def test_what_it_walks(
    update: LocalUpdate, dtype: torch.dtype, biased: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = simulated(tiny(), lambda: nn.Sequential(nn.Linear(5, 3, bias=biased)), dtype=dtype)
    assert chosen(federation, monkeypatch, update) == {expected.__name__}


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = stack((20, 5))
    assert kernel.walks_whole(sgd(), OuterLoss("path"))
    assert not kernel.walks_whole(sgd(), OuterLoss("mse")), "an outer loss of another kind"
    assert not can_walk(torch.zeros(2, 3, dtype=torch.bfloat16))
    library._library.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not can_walk(torch.zeros(2, 3)), "a processor without the vectors it was built for"
    library._library.cache_clear()


def test_the_way_back_keeps_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(budget: int | None) -> Tensor:
        federation = SimulatedFederation(tiny(), dtype=torch.float64, memory_budget=budget)
        theta, start = torch.full((3, 3), 0.6).double(), federation.initial_model("a")
        return unfold(federation, theta, Algorithm(), OuterLoss("path"), "exact", run="a", model=start).gradient

    wanted = gradient(None)
    with pytest.raises(AssertionError), monkeypatch.context() as patched:
        patched.setattr(NativeWalk, "backward", _not_called)
        gradient(None)
    monkeypatch.setattr(NativeWalk, "backward", _not_called)
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
    rows = Rows.of(x)
    background = torch.zeros(x.shape[1]).double() if rows.background is None else rows.background
    torch.testing.assert_close(rows.values + background, x)
    if rows.marks is not None:
        bits = np.unpackbits(rows.marks, axis=1, bitorder="little")
        assert bits.shape[1] % 64 == 0
        np.testing.assert_array_equal(bits[:, : x.shape[1]], (rows.values != 0).numpy())
        assert not bits[:, x.shape[1] :].any()
    if rows.overlaps is not None:
        torch.testing.assert_close(rows.overlaps, rows.values @ background)


def test_numbers_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        Comparison(lambda kernel, x, y, *parts: native(kernel, x, y.int(), *parts)).check((20, 5), sgd(), None, 1e-12)

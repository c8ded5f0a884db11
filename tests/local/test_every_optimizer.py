"""What holds for every local optimiser, whatever the gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer
from fedunfold.local import accumulated, adamw, clipped, decayed, feddyn, momentum, nova, prox, scaffold, sgd

PLAIN = (sgd(), prox(2.0), momentum(0.5))
NO_SUMS = [
    adamw(weight_decay=0.2),
    scaffold(),
    feddyn(0.3),
    *(decayed(base, 0.3) for base in PLAIN),
    *(clipped(base, 0.5) for base in (*PLAIN, adamw(), *(decayed(base) for base in PLAIN))),
]
ALL = [sgd(), prox(0.3), nova(), momentum(0.5), *(accumulated(base) for base in PLAIN), *NO_SUMS]
every = pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: optimizer.name)


@pytest.mark.parametrize(
    ("optimizer", "factors"),
    [
        (sgd(), [1, 1, 1]),
        (nova(), [1, 1, 1]),
        (prox(2.0), [0.64, 0.8, 1]),  # 1 − ημ = 0.8
        (accumulated(prox(2.0)), [0.64, 0.8, 1]),
        (momentum(0.5), [1.75, 1.5, 1]),  # 1 + ½ + ¼, 1 + ½, 1
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gradient_factors_by_hand(optimizer: LocalOptimizer, factors: list[float]) -> None:
    assert optimizer.gradient_factors(3, lr=0.1).tolist() == pytest.approx(factors)


@given(
    optimizer=st.sampled_from([sgd(), prox(0.3), prox(5.0), momentum(0.5), momentum(0.9)]),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
    lr=st.floats(0.001, 0.15),
)
def test_gradient_factors_sum_up_the_local_steps(optimizer: LocalOptimizer, gradients: list[float], lr: float) -> None:
    """On a line, with these gradients whatever the place: w^(t) − w_k = η Σ_τ a_τ g_τ."""
    start = params = torch.tensor([[0.7]], dtype=torch.float64)
    state, rate = optimizer.init(params), torch.full_like(params, lr)
    for gradient in gradients:
        params, state = optimizer.step(params, torch.full_like(params, gradient), state, rate, start)
    moved = lr * float(optimizer.gradient_factors(len(gradients), lr) @ np.array(gradients))
    assert float(start - params) == pytest.approx(moved, rel=1e-9, abs=1e-9)


def test_the_sums_of_gradient_factors() -> None:
    def norms(optimizer: LocalOptimizer) -> list[float]:
        return [float(optimizer.gradient_factors(steps, 0.1).sum()) for steps in (3, 0, 1)]

    assert norms(sgd()) == [3, 0, 1]
    assert norms(prox(2.0)) == pytest.approx([2.44, 0, 1])
    assert norms(momentum(0.5)) == pytest.approx([4.25, 0, 1])


@pytest.mark.parametrize("optimizer", NO_SUMS, ids=lambda optimizer: optimizer.name)
def test_where_updates_are_no_sums_of_gradients_factors_are_refused(optimizer: LocalOptimizer) -> None:
    with pytest.raises(InputError, match=f"{optimizer.name}: its updates are no weighted sums"):
        optimizer.gradient_factors(3, lr=0.1)
    with pytest.raises(
        InputError, match=f"accumulated.. takes sgd, prox or momentum as its base, not {optimizer.name}"
    ):
        accumulated(optimizer)
    assert optimizer.fused_mu is None
    assert not optimizer.normalized


@every
def test_what_depends_on_the_place_does_not_use_gradients_only(optimizer: LocalOptimizer) -> None:
    """Two starts, the same gradients: the same update where it is a function of the gradients alone."""
    draw = torch.Generator().manual_seed(2)
    starts, gradients = torch.randn(2, 3, generator=draw, dtype=torch.float64), torch.randn(3, 3, generator=draw)
    params, state, lr = starts, optimizer.init(starts), torch.full((2, 1), 0.1, dtype=torch.float64)
    for gradient in gradients.double():
        params, state = optimizer.step(params, gradient.expand(2, -1), state, lr, starts)
    moved = params - starts
    free = torch.allclose(moved[0], moved[1], rtol=1e-12, atol=1e-12)
    pulls_to_start = optimizer.fused_mu is not None  # prox's pull is to the start, wherever that is
    assert free == (optimizer.uses_gradients_only or pulls_to_start)


@pytest.mark.parametrize("optimizer", PLAIN, ids=lambda optimizer: optimizer.name)
def test_unscaled_ones_have_scales_of_one(optimizer: LocalOptimizer) -> None:
    inside, after = optimizer.scales(np.array([10, 30]), np.array([4, 2]), 0.1)
    assert inside.tolist() == after.tolist() == [1, 1]


@every
def test_nothing_changes_in_place(optimizer: LocalOptimizer) -> None:
    params, gradient, anchor = (torch.randn(2, 3, dtype=torch.float64) for _ in range(3))
    state = optimizer.init(params)
    before = [tensor.clone() for tensor in (params, gradient, anchor, *state)]
    optimizer.step(params, gradient, state, torch.tensor([[0.1], [0.2]], dtype=torch.float64), anchor)
    assert all(map(torch.equal, before, (params, gradient, anchor, *state)))


@every
def test_every_client_steps_by_itself(optimizer: LocalOptimizer) -> None:
    """Two steps of three clients at once, against those of each alone."""
    draw = torch.Generator().manual_seed(1)
    params, anchor, *gradients = (torch.randn(3, 4, dtype=torch.float64, generator=draw) for _ in range(4))
    lr = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)

    def trained(rows: slice) -> torch.Tensor:
        now, state = params[rows], optimizer.init(params[rows])
        for gradient in gradients:
            now, state = optimizer.step(now, gradient[rows], state, lr[rows], anchor[rows])
        return now

    torch.testing.assert_close(trained(slice(0, 3)), torch.cat([trained(slice(k, k + 1)) for k in range(3)]))


@every
def test_it_is_made_again_from_its_description(optimizer: LocalOptimizer) -> None:
    assert LOCAL_OPTIMIZERS.make(**optimizer.describe()) == optimizer


def test_names() -> None:
    named = [sgd(), prox(), nova(), momentum(), accumulated(prox())]
    assert [optimizer.name for optimizer in named] == ["sgd", "prox", "nova", "momentum", "accumulated-prox"]
    assert set(LOCAL_OPTIMIZERS.names()) >= {optimizer.name for optimizer in ALL}

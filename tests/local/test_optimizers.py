import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.local.optimizers import LocalOptimizer, accumulated, momentum, nova, prox, sgd

SIZES = np.array([10, 30])


@pytest.mark.parametrize(
    ("update", "factors"),
    [
        (sgd(), [1, 1, 1]),
        (nova(), [1, 1, 1]),
        (prox(2.0), [0.64, 0.8, 1]),  # 1 − ημ = 0.8
        (accumulated(prox(2.0)), [0.64, 0.8, 1]),
        (momentum(0.5), [1.75, 1.5, 1]),  # 1 + ½ + ¼, 1 + ½, 1
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gradient_factors_by_hand(update: LocalOptimizer, factors: list[float]) -> None:
    assert update.gradient_factors(3, lr=0.1).tolist() == pytest.approx(factors)


@given(
    update=st.sampled_from([sgd(), prox(0.3), prox(5.0), momentum(0.5), momentum(0.9)]),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
    lr=st.floats(0.001, 0.15),
)
def test_gradient_factors_sum_up_the_local_walk(update: LocalOptimizer, gradients: list[float], lr: float) -> None:
    """On a line, with these gradients whatever the place: w^(t) − w_k = η Σ_τ a_τ g_τ."""
    start = place = 0.7
    buffer = 0.0
    for gradient in gradients:
        buffer = update.momentum * buffer + gradient
        place -= lr * (buffer + update.mu * (place - start))
    walked = lr * float(update.gradient_factors(len(gradients), lr) @ np.array(gradients))
    assert start - place == pytest.approx(walked, rel=1e-9, abs=1e-9)


def test_factor_norms() -> None:
    assert sgd().factor_norms(np.array([3, 0, 1]), 0.1).tolist() == [3, 0, 1]
    assert prox(2.0).factor_norms(np.array([3, 0, 1]), 0.1).tolist() == pytest.approx([2.44, 0, 1])
    assert momentum(0.5).factor_norms(np.array([3, 0, 1]), 0.1).tolist() == pytest.approx([4.25, 0, 1])


@pytest.mark.parametrize("update", [sgd(), prox(2.0), momentum(0.5)], ids=lambda update: update.name)
def test_unscaled_rules_have_scales_of_one(update: LocalOptimizer) -> None:
    inside, after = update.scales(SIZES, np.array([4, 2]), 0.1)
    assert inside.tolist() == after.tolist() == [1, 1]


def test_nova_scales_steps_inside_the_loop() -> None:
    # τ_eff = ¼·4 + ¾·2 = 2.5
    inside, after = nova().scales(SIZES, np.array([4, 2]), 0.1)
    assert inside.tolist() == [0.625, 1.25]
    assert after.tolist() == [1, 1]


def test_an_absent_client_counts_no_steps_and_shares_stay() -> None:
    # τ_eff = ¼·4 + ¾·0 = 1, not 4.
    inside, _ = nova().scales(SIZES, np.array([4, 0]), 0.1)
    assert inside.tolist() == [0.25, 1]
    _, after = accumulated(sgd()).scales(SIZES, np.array([4, 0]), 0.1)
    assert after.tolist() == [0.25, 1]


@pytest.mark.parametrize("update", [nova(), accumulated(prox(1.0))], ids=lambda update: update.name)
def test_all_absent(update: LocalOptimizer) -> None:
    inside, after = update.scales(SIZES, np.array([0, 0]), 0.1)
    assert inside.tolist() == after.tolist() == [1, 1]


def test_accumulated_scales_the_whole_update() -> None:
    # ‖a‖₁ = 1.8 for two prox steps and 1 for one: τ_eff = ¼·1.8 + ¾·1 = 1.2.
    inside, after = accumulated(prox(2.0)).scales(SIZES, np.array([2, 1]), 0.1)
    assert inside.tolist() == [1, 1]
    assert after.tolist() == pytest.approx([1.2 / 1.8, 1.2])


@given(
    base=st.sampled_from([sgd(), prox(0.5), momentum(0.8)]),
    sizes=st.lists(st.integers(1, 500), min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_accumulated_with_matching_weights_is_its_base(
    base: LocalOptimizer, sizes: list[int], steps: list[int]
) -> None:
    """Θ̃_k = (N_k/N) ‖a_k‖₁ / τ_eff undoes the rescaling."""
    shares = np.array(sizes) / sum(sizes)
    norms = base.factor_norms(np.array(steps), 0.1)
    matching = shares * norms / (shares @ norms)
    _, after = accumulated(base).scales(np.array(sizes), np.array(steps), 0.1)
    assert matching.sum() == pytest.approx(1)
    assert (matching * after).tolist() == pytest.approx(shares.tolist())


def test_names() -> None:
    named = [sgd(), prox(), nova(), momentum(), accumulated(prox())]
    assert [update.name for update in named] == ["sgd", "prox", "nova", "momentum", "accumulated-prox"]


@pytest.mark.parametrize("mu", [-0.1, math.nan])
def test_prox_refuses(mu: float) -> None:
    with pytest.raises(InputError, match="mu >= 0"):
        prox(mu)


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.5, math.nan])
def test_momentum_refuses(rho: float) -> None:
    with pytest.raises(InputError, match="0 < rho < 1"):
        momentum(rho)


@pytest.mark.parametrize("base", [nova(), accumulated(sgd())], ids=lambda update: update.name)
def test_accumulated_refuses_what_is_scaled_already(base: LocalOptimizer) -> None:
    with pytest.raises(InputError, match=f"not {base.name}"):
        accumulated(base)

"""Scales by hand: steps inside the loop (nova), the whole update after it (accumulated)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer
from fedunfold.local import accumulated, momentum, nova, prox, sgd

SIZES = np.array([10, 30])


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


def test_a_client_that_was_not_sampled_has_no_share() -> None:
    # Its size is given as 0: τ_eff = ¼·4 + ¾·2 over the two of the cohort, whatever the third holds.
    inside, _ = nova().scales(np.array([10, 30, 0]), np.array([4, 2, 0]), 0.1)
    assert inside.tolist() == [0.625, 1.25, 1]
    _, after = accumulated(sgd()).scales(np.array([10, 30, 0]), np.array([4, 2, 0]), 0.1)
    assert after.tolist() == [0.625, 1.25, 1]


@pytest.mark.parametrize("optimizer", [nova(), accumulated(prox(1.0))], ids=lambda optimizer: optimizer.name)
def test_all_absent(optimizer: LocalOptimizer) -> None:
    inside, after = optimizer.scales(SIZES, np.array([0, 0]), 0.1)
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
    norms = np.array([base.gradient_factors(n, 0.1).sum() for n in steps])
    matching = shares * norms / (shares @ norms)
    _, after = accumulated(base).scales(np.array(sizes), np.array(steps), 0.1)
    assert matching.sum() == pytest.approx(1)
    assert (matching * after).tolist() == pytest.approx(shares.tolist())


@pytest.mark.parametrize("base", [sgd(), prox(0.3), momentum(0.5)], ids=lambda base: base.name)
def test_accumulated_trains_by_its_base_and_is_made_again_from_its_description(base: LocalOptimizer) -> None:
    optimizer = accumulated(base)
    assert optimizer.fused_mu == base.fused_mu
    assert optimizer.gradient_factors(3, 0.1).tolist() == base.gradient_factors(3, 0.1).tolist()
    assert LOCAL_OPTIMIZERS.make(**optimizer.describe()) == optimizer


@pytest.mark.parametrize("base", [nova(), accumulated(sgd())], ids=lambda base: base.name)
def test_accumulated_refuses_what_is_scaled_already(base: LocalOptimizer) -> None:
    with pytest.raises(InputError, match=f"not {base.name}"):
        accumulated(base)

import math

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.local import momentum


def test_two_steps_by_hand() -> None:
    """v: 1 → ½·1 + 2 = 2.5;  w: 0 → −0.1 → −0.35."""
    optimizer, params, lr = momentum(0.5), torch.zeros(1, 1), torch.tensor([[0.1]])
    state = optimizer.init(params)
    assert [part.tolist() for part in state] == [[[0.0]]]
    params, state = optimizer.step(params, torch.tensor([[1.0]]), state, lr, torch.zeros(1, 1))
    params, state = optimizer.step(params, torch.tensor([[2.0]]), state, lr, torch.zeros(1, 1))
    assert params.item() == pytest.approx(-0.35)
    assert state[0].item() == 2.5


def test_no_compiled_code_makes_its_steps() -> None:
    assert momentum().fused_mu is None
    assert not momentum().normalized


def test_gradient_factors_by_hand() -> None:
    # 1 + ½ + ¼, 1 + ½, 1
    assert momentum(0.5).gradient_factors(3, lr=0.1).tolist() == pytest.approx([1.75, 1.5, 1])


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.5, math.nan])
def test_bad_settings_are_refused(rho: float) -> None:
    with pytest.raises(InputError, match="0 < rho < 1"):
        momentum(rho)

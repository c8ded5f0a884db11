import math

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.local import prox


def test_a_step_by_hand() -> None:
    # 1 − 0.5 (1 + 2 (1 − 0.5)) and 2 − 0.5 (−1 + 2 (2 − 2))
    params, anchor = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 2.0]])
    after, state = prox(2.0).step(params, torch.tensor([[1.0, -1.0]]), (), torch.tensor([[0.5]]), anchor)
    assert after.tolist() == [[0.0, 2.5]]
    assert state == ()


def test_it_is_a_step_that_compiled_code_makes() -> None:
    assert prox(0.3).fused_mu == 0.3
    assert not prox().normalized


def test_gradient_factors_by_hand() -> None:
    assert prox(2.0).gradient_factors(3, lr=0.1).tolist() == pytest.approx([0.64, 0.8, 1])  # 1 − ημ = 0.8


@pytest.mark.parametrize("mu", [-0.1, math.nan, math.inf])
def test_bad_settings_are_refused(mu: float) -> None:
    with pytest.raises(InputError, match="mu >= 0"):
        prox(mu)

import math

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS
from fedunfold.local import feddyn
from fedunfold.training.methods import method


def test_a_step_by_hand() -> None:
    # 1 − 0.5 (1 + 2 + 2 (1 − 0.5)) and 2 − 0.5 (−1 + 0 + 2 (2 − 3)), v_k being −h_k
    params, correction = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0]])
    gradient, lr, anchor = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5]]), torch.tensor([[0.5, 3.0]])
    after, state = feddyn(2.0).step(params, gradient, (correction,), lr, anchor)
    assert after.tolist() == [[-1.0, 3.5]]
    assert len(state) == 1 and torch.equal(state[0], correction)


def test_control_variates_by_hand() -> None:
    own, shared = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0])
    assert feddyn(2.0).correction(own, shared).tolist() == [[-1.0], [-4.0]]
    updates, steps = torch.tensor([[2.0], [-1.0]]), torch.tensor([4, 1])
    # h_k − α Δ_k = 1 − 2 · 2 and 4 + 2 · 1
    assert (own + feddyn(2.0).change(shared, updates, steps, lr=0.5)).tolist() == [[-3.0], [6.0]]
    assert feddyn(2.0).corrected_model(torch.tensor([1.0]), shared).tolist() == [-0.5]  # w − h/α = 1 − 3/2


def test_names() -> None:
    assert LOCAL_OPTIMIZERS.parse("feddyn:alpha=0.5") == feddyn(0.5)
    plain, learned = method("feddyn"), method("duw-feddyn")
    assert plain.rule is not None and plain.rule.name == "uniform"
    assert learned.rule is None
    assert plain.algorithm == learned.algorithm
    assert (plain.algorithm.local, plain.algorithm.absent) == (feddyn(0.1), "drop")


@pytest.mark.parametrize("alpha", [0.0, -0.1, math.nan, math.inf])
def test_bad_settings_are_refused(alpha: float) -> None:
    with pytest.raises(InputError, match="feddyn needs a finite alpha > 0"):
        feddyn(alpha)

import pytest
import torch

from fedunfold.core.parts import LOCAL_OPTIMIZERS
from fedunfold.local import scaffold
from fedunfold.training.methods import method


def test_a_step_by_hand() -> None:
    # 1 − 0.5 (1 + 2) and 2 − 0.5 (−1 + 0): the anchor has no part in it
    params, correction = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0]])
    gradient, lr, anchor = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5]]), torch.full((1, 2), 9.0)
    after, state = scaffold().step(params, gradient, (correction,), lr, anchor)
    assert after.tolist() == [[-0.5, 2.5]]
    assert len(state) == 1 and torch.equal(state[0], correction)


def test_control_variates_by_hand() -> None:
    own, shared = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0])
    assert scaffold().correction(own, shared).tolist() == [[2.0], [-1.0]]  # c − c_k
    updates, steps = torch.tensor([[2.0], [-1.0]]), torch.tensor([4, 1])
    # c_k⁺ = c_k − c − Δ_k/(η τ_k) = 1 − 3 − 2/(0.5 · 4) and 4 − 3 + 1/(0.5 · 1)
    assert (own + scaffold().change(shared, updates, steps, lr=0.5)).tolist() == [[-3.0], [3.0]]


def test_the_servers_model_is_that_of_its_optimiser() -> None:
    model = torch.tensor([1.0, 2.0])
    assert torch.equal(scaffold().corrected_model(model, torch.tensor([5.0, 5.0])), model)


def test_names() -> None:
    assert LOCAL_OPTIMIZERS.parse("scaffold") == scaffold()
    plain, weighed, learned = method("scaffold"), method("dr-scaffold"), method("duw-scaffold")
    assert plain.rule is not None and plain.rule.name == "uniform"
    assert weighed.rule is not None and weighed.rule.name.startswith("dr")
    assert learned.rule is None
    for found in (plain, weighed, learned):
        assert found.algorithm.local == scaffold()
        assert found.algorithm.absent == "drop"


@pytest.mark.parametrize("prefix", ["median", "trimmed", "krum"])
def test_no_other_aggregator_has_a_name_with_it(prefix: str) -> None:
    with pytest.raises(ValueError, match=f"unknown method '{prefix}-scaffold'"):
        method(f"{prefix}-scaffold")

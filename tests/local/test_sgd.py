import torch

from fedunfold.local import sgd


def test_a_step_by_hand() -> None:
    params, gradient = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, -1.0], [2.0, 0.0]])
    after, state = sgd().step(params, gradient, (), torch.tensor([[0.5], [0.25]]), params)
    assert after.tolist() == [[0.5, 2.5], [-0.5, 1.0]]
    assert state == ()


def test_it_is_the_step_that_compiled_code_makes() -> None:
    assert sgd().fused_mu == 0
    assert not sgd().normalized


def test_every_gradient_counts_once() -> None:
    assert sgd().gradient_factors(3, lr=0.1).tolist() == [1, 1, 1]
    assert len(sgd().gradient_factors(0, lr=0.1)) == 0
